"""Trackers: what each writes, read back with its own package; and that none can hurt a run."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gesso import build, run
from gesso.config import Tracker as Settings
from gesso.config.tables import tomllib
from gesso.track.run_folder import RunFolder
from gesso.track.trackers.base import caption, figures_of, image_of, samples_of
from gesso.track.trackers.process import Tracked
from gesso.types import Prompt, PromptImage, Sample, Score, UserError
from tests.waiting import until

BAD = "tests.track.bad_trackers"
CONFIG = {"seed": 3, "model": {"path": "zoo:signs"}, "reward": [{"name": "ocr"}]}
RED: np.ndarray = np.full((8, 16, 3), (255, 0, 0), np.uint8)
BLUE: np.ndarray = np.full((8, 16, 3), (0, 0, 255), np.uint8)


def row(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "reward": step / 4, "update/lr": 1e-4, "health": [], **more}


def drawn(folder: RunFolder, step: int) -> None:
    """An evaluation of a model that draws."""
    prompts = [Prompt('a sign | "KITE"'), Prompt("a sea")]
    samples = [Sample(p, image, 7) for p, image in zip(prompts, (RED, BLUE), strict=True)]
    folder.save_samples(step, samples, [Score(0.5 + step / 8), Score.failed("no letters")])
    folder.append(row(step, **{"eval/reward": 0.5 + step / 8}))


def edited(folder: RunFolder, step: int) -> None:
    """An evaluation of a model that edits: the source is larger than the result."""
    source = io.BytesIO()
    Image.fromarray(BLUE.repeat(2, 0).repeat(2, 1)).save(source, "PNG")
    prompt = Prompt("make it red", images=(PromptImage(data=source.getvalue()),))
    folder.save_samples(step, [Sample(prompt, RED, 7)], [Score(1.0)])


def written(folder: RunFolder, step: int) -> None:
    """An evaluation of a model that writes."""
    sample = Sample(Prompt("how many?", columns={"answer": "2"}), None, 7, "two\n| 2 |")
    folder.save_samples(step, [sample], [Score(1.0)])
    folder.append(row(step, **{"eval/reward": 1.0}))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run folder, and a home without keys in which packages may write what they like."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "SWANLAB_API_KEY", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return RunFolder.create(tmp_path / "run-1", CONFIG)


def sitting(
    folder: RunFolder,
    *names: str,
    write: Callable[[], None] = lambda: None,
    ok: bool = True,
    **settings: Any,
) -> list[str]:
    """Track the folder while something is written into it; what the run was told."""
    told: list[str] = []
    chosen = Settings(**{"offline": True, **settings})
    trackers = [
        Tracked(n, build.TRACKERS.get(n, n), folder.path, CONFIG, chosen, told.append)
        for n in names
    ]
    for tracker in trackers:
        tracker.start()
    write()
    for tracker in trackers:
        tracker.news()
    for tracker in trackers:
        tracker.finish(ok)
    for tracker in trackers:
        tracker.join()
    return told


def needs(name: str) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'gesso[{name}]'")


def wandb_records(file: Path) -> Iterator[Any]:
    """Its log: a header of 7 bytes, then blocks of 32 KiB with records of
    (checksum, length, whole/first/middle/last)."""
    from wandb.proto import wandb_internal_pb2

    proto: Any = wandb_internal_pb2  # made at run time: no checker sees what is in it
    data, at, held = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        held += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield proto.Record.FromString(held)
            held = b""


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """Of all sittings in turn."""
    rows = []
    for file in sorted(folder.glob("trackers/wandb/offline-run-*/run-*.wandb")):
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                found = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
                rows.append(found)
    return rows


def two_sittings(folder: RunFolder, name: str, **settings: Any) -> list[str]:
    """Steps 0 to 2, and the run fails; then it is resumed after step 1, so that step 2 comes again,
    before the tracker is there, and 3; at last an evaluation as of a model that writes."""

    def first() -> None:
        drawn(folder, 0)
        folder.append(row(1, broken=float("nan"), **{"update/ratio": None}))
        drawn(folder, 2)

    told = sitting(folder, name, write=first, ok=False, **settings)
    folder.rewind(1)
    folder.append(row(2))

    def second() -> None:
        folder.append(row(3, health=["flat-groups"]))
        written(folder, 4)

    told += sitting(folder, name, write=second, **settings)
    state = json.loads((folder.path / "trackers" / f"{name}.json").read_text())
    assert state["step"] == 4
    return told


LATE = "it did not (respond within 1.5 s|finish within 1.5 s after the run);"
REWARDS = [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]


def test_tensorboard(folder: RunFolder) -> None:
    needs("tensorboard")
    told = two_sittings(folder, "tensorboard")
    assert told == [f"tensorboard: {folder.path}/trackers/tensorboard"] * 2
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder.path / "trackers/tensorboard"), {"images": 0, "tensors": 0})
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("train/reward")] == REWARDS
    assert [(e.step, e.value) for e in found.Scalars("eval/reward")] == [
        (0, 0.5), (2, 0.75), (4, 1.0),
    ]  # fmt: skip
    assert [e.value for e in found.Scalars("train/warnings")] == [0, 0, 0, 1, 0]
    tags = found.Tags()
    assert tags["images"] == ["samples/000", "samples/001"]
    assert not {"train/broken", "update/ratio", "train/step"} & set(tags["scalars"])
    images = found.Images("samples/000")
    assert [(e.step, e.width, e.height) for e in images] == [(0, 16, 8), (2, 16, 8)]
    png = (folder.path / "samples/000002/000.png").read_bytes()
    assert images[1].encoded_image_string == png
    assert found.SummaryMetadata("samples/001").summary_description == "a sea"
    (table, _, said) = [e.tensor_proto.string_val[0].decode() for e in found.Tensors("samples")]
    assert "| 000 | how many? | two \\| 2 \\| | 2 | 1.000 |" in said
    assert '| 000 | a sign \\| "KITE" |  |  | 0.500 |' in table
    assert "| 001 | a sea |  |  | no score: no letters |" in table
    (config,) = [e.tensor_proto.string_val[0].decode() for e in found.Tensors("config")]
    assert '"path": "zoo:signs"' in config


def test_wandb(folder: RunFolder) -> None:
    needs("wandb")
    told = two_sittings(folder, "wandb")
    runs = sorted((folder.path / "trackers/wandb").glob("offline-run-*"))
    assert told == [f"wandb: {path}" for path in runs] and len(runs) == 2
    assert len({path.name.rpartition("-")[2] for path in runs}) == 1  # one id: one run, synced
    rows = wandb_history(folder.path)
    assert [(r["_step"], r["train/reward"]) for r in rows] == REWARDS
    assert [r.get("eval/reward") for r in rows] == [0.5, None, 0.75, None, 1.0]
    assert "train/broken" not in rows[1] and "update/ratio" not in rows[1]
    assert rows[0]["samples/captions"] == [
        'a sign | "KITE" | 0.500',
        "a sea | no score: no letters",
    ]
    first = runs[0] / "files" / rows[2]["samples/filenames"][1]
    assert first.read_bytes() == (folder.path / "samples/000002/001.png").read_bytes()
    assert rows[4]["samples/_type"] == "table-file"
    (file,) = runs[1].glob("files/media/table/*.json")
    assert json.loads(file.read_text())["data"] == [["how many?", None, "two\n| 2 |", "2", 1.0]]
    log = next(runs[0].glob("*.wandb"))
    head = next(r.run for r in wandb_records(log) if r.HasField("run"))
    config = {u.key: json.loads(u.value_json) for u in head.config.update}
    assert (head.project, head.display_name) == ("gesso", "run-1")
    assert config["model"] == {"path": "zoo:signs"} and not head.git.remote_url
    kept = {path.name for path in (runs[0] / "files").iterdir()}
    assert kept == {"media"}  # no list of packages, no code, no account of the machine


def test_swanlab(folder: RunFolder) -> None:
    needs("swanlab")
    two_sittings(folder, "swanlab")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    scalars, media, starts = [], [], []
    files = sorted((folder.path / "trackers/swanlab").glob("run-*/*.swanlab"))
    for file in files:
        reader = DataStoreReader()
        reader.open(file)
        for record in map(Record.FromString, reader):
            scalars += [record.scalar] if record.HasField("scalar") else []
            media += [record.media] if record.HasField("media") else []
            starts += [record.start] if record.HasField("start") else []
    rewards = [(s.step, s.value.number) for s in scalars if s.key == "train/reward"]
    assert rewards == REWARDS and "train/broken" not in {s.key for s in scalars}
    assert [(m.key, m.step, len(m.value.items)) for m in media] == [
        ("samples", 0, 2), ("samples", 2, 2), ("samples", 4, 1),
    ]  # fmt: skip
    assert media[0].value.items[1].caption == "a sea | no score: no letters"
    picture = files[0].parent / "media/image" / media[0].value.items[0].filename
    assert picture.stat().st_size == media[0].value.items[0].size
    (text,) = files[1].parent.glob("media/text/*.txt")
    assert text.read_text() == "how many?\n\ntwo\n| 2 |\n\nexpected: 2"
    assert len({s.id for s in starts}) == 1 and {s.project for s in starts} == {"gesso"}
    assert "zoo:signs" in (files[0].parent / "files/config.yaml").read_text()
    assert not (files[0].parent / "files/requirements.txt").exists()


def test_mlflow(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("mlflow")
    store = str(folder.path / "files")  # of its own; without one there is a database, see below
    assert two_sittings(folder, "mlflow", uri=store) == [f"mlflow: {store}"] * 2
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("gesso")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    name = found.info.run_id
    history = client.get_metric_history(name, "train/reward")
    assert [(m.step, m.value) for m in history] == REWARDS
    assert found.info.status == "FINISHED" and found.info.run_name == "run-1"
    assert found.data.params["model.path"] == "zoo:signs"
    assert not {"train/broken", "update/ratio"} & set(found.data.metrics)
    images = [file.path for file in client.list_artifacts(name, "images")]
    pictures = [p.split("+")[:3] for p in images if p.endswith(".png")]
    assert [p for p in pictures if "000" in p[0]] == [
        ["images/samples~000", "step", step] for step in ("0", "2")
    ]
    kept = client.download_artifacts(name, "samples/000002.json", str(folder.path.parent))
    table = json.loads(Path(kept).read_text())
    assert table["data"][0] == [0, 'a sign | "KITE"', "", "", "0.750"]
    kept = client.download_artifacts(name, "samples/000004.json", str(folder.path.parent))
    assert json.loads(Path(kept).read_text())["data"] == [
        [0, "how many?", "two\n| 2 |", "2", "1.000"],
    ]  # fmt: skip


def test_mlflow_has_a_database_by_default(folder: RunFolder) -> None:
    needs("mlflow")
    written(folder, 0)
    sitting(folder, "mlflow", ok=False)
    trackers = folder.path / "trackers"
    assert json.loads((trackers / "mlflow.json").read_text())["step"] == 0
    (kept,) = trackers.glob("mlflow/artifacts/*/artifacts/samples/000000.json")
    assert json.loads(kept.read_text())["data"] == [[0, "how many?", "two\n| 2 |", "2", "1.000"]]


@pytest.mark.parametrize(
    "name, words", [("wandb", "No API key configured"), ("swanlab", "no API key")]
)
def test_a_tracker_without_a_key_is_reported_and_does_not_prompt(
    folder: RunFolder, name: str, words: str
) -> None:
    needs(name)
    (told,) = sitting(folder, name, offline=False)
    assert told.startswith(f"tracker {name} is disabled: ") and words in told


def test_a_tracker_without_a_network_is_disabled(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody is there
    (told,) = sitting(folder, "wandb", offline=False, patience=2.0)
    assert re.match("tracker wandb is disabled: it did not (respond|finish)", told)


def test_a_place_and_a_name_of_ones_own(folder: RunFolder, tmp_path: Path) -> None:
    needs("tensorboard")
    folder.append(row(0))
    place = str(tmp_path / "all")
    (told,) = sitting(folder, "tensorboard", dir=place, name="mine")
    assert told == f"tensorboard: {place}/tensorboard/mine"
    assert len([*Path(place, "tensorboard", "mine").glob("events.*")]) == 1
    assert [p.name for p in (folder.path / "trackers").iterdir() if p.is_dir()] == []


@pytest.mark.parametrize(
    "kind, reason",
    [
        ("FailsAtStart", "ConnectionError: no route to host"),
        ("FailsInLog", "RuntimeError: quota exceeded"),
        ("FailsAtEnd", "OSError: disk full"),
        ("Dies", "its process died"),
        ("Asks", "EOFError"),
        ("HangsAtStart", LATE),
        ("HangsInLog", LATE),
        ("HangsAtEnd", LATE),
    ],
)
def test_a_tracker_that_fails_is_reported_once(
    folder: RunFolder, kind: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for step in range(4):
        folder.append(row(step))
    started = time.monotonic()
    waited: list[float] = []

    def write() -> None:
        time.sleep(0.1)
        waited.append(-time.monotonic())
        drawn(folder, 4)
        waited[0] += time.monotonic()

    patience = 1.5 if "Hangs" in kind else 60.0
    told = sitting(folder, f"{BAD}:{kind}", write=write, patience=patience)
    warnings = [text for text in told if "disabled" in text]
    assert len(warnings) == 1, told
    assert re.match(f"tracker {BAD}:{kind} is disabled: {reason}", warnings[0])
    assert "the run continues" in warnings[0] and waited[0] < patience
    assert time.monotonic() - started < 300  # what hangs sleeps 600
    file = folder.path / f"trackers/{BAD}.{kind}/told.jsonl"
    for process in (
        {json.loads(line)[0] for line in file.read_text().splitlines()} if file.exists() else ()
    ):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)  # nothing stays behind
    assert capfd.readouterr() == ("", "")  # what it printed is in its log
    if kind == "Asks":
        assert "shouting" in (folder.path / f"trackers/{BAD}.Asks.log").read_text()


def told_by(file: Path, count: int) -> list[Any]:
    """What `Records` was told, once there is so much of it."""

    def lines() -> list[str]:
        return file.read_text().splitlines() if file.exists() else []

    until(lambda: len(lines()) >= count, output=lambda: str(lines()))
    return [json.loads(line)[1:] for line in lines()]


def test_rows_are_logged_as_they_come(folder: RunFolder) -> None:
    name = f"{BAD}:Records"
    file = folder.path / f"trackers/{BAD}.Records/told.jsonl"
    tracker = Tracked(name, name, folder.path, {}, Settings(), lambda text: None)
    tracker.start()
    for step in range(3):
        folder.append(row(step))
        tracker.news()
        assert told_by(file, step + 2)[-1][:2] == ["log", step]
    with folder.metrics_file.open("a") as half:
        half.write('{"step": 3, "rew')
    tracker.news()
    tracker.finish(ok=True)
    tracker.join()
    assert told_by(file, 5)[-1] == ["finish", True]


def test_a_killed_run_leaves_a_finished_tracker(folder: RunFolder) -> None:
    for step in range(2):
        folder.append(row(step))
    code = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from gesso.config import Tracker as Settings\n"
        "from gesso.track.trackers.process import Tracked\n"
        f"name = '{BAD}:Records'\n"
        "Tracked(name, name, Path(sys.argv[1]), {}, Settings(), lambda text: None).start()\n"
        "while True: time.sleep(1)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(folder.path)])
    file = folder.path / f"trackers/{BAD}.Records/told.jsonl"
    lines = told_by(file, 3)
    assert [line[:2] for line in lines] == [["start", None], ["log", 0], ["log", 1]]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert told_by(file, 4)[-1] == ["finish", False]


def test_a_run_that_is_killed_before_it_hears_an_answer(folder: RunFolder) -> None:
    """A tracker is finished, too, whose last answer nobody was left to read."""
    for step in range(2):
        folder.append(row(step))
    name = f"{BAD}:Records"
    order = Tracked(name, name, folder.path, {}, Settings(), lambda text: None).order
    worker = [sys.executable, "-m", "gesso.track.trackers.worker"]
    with subprocess.Popen(worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
        assert "where" in json.loads(process.stdout.readline())
        process.stdout.close()
        process.stdin.write(b'"news"\n')
        process.stdin.close()
    lines = told_by(folder.path / f"trackers/{BAD}.Records/told.jsonl", 4)
    assert [line[:2] for line in lines[1:]] == [["log", 0], ["log", 1], ["finish", False]]


def test_a_run_with_trackers_finishes_and_resumes(recipe_data: dict, tmp_path: Path) -> None:
    """With a real loop: one tracker fails at step 1; after resume it gets what it missed."""
    trackers = [f"{BAD}:FailsInLog", f"{BAD}:Records"]
    data = recipe_data | {"track": trackers, "steps": 2, "eval": {"every": 0, "prompts": 1}}
    data["algorithm"]["steps"] = 2
    finished = run.train(build.recipe_from(data), folder=tmp_path / "run")
    assert [r["step"] for r in finished.rows()] == [0, 1, 2]
    log = (finished.path / "log.txt").read_text()
    assert log.count("is disabled") == 1 and "quota exceeded" in log
    run.resume(finished.path, steps=3)

    def steps(kind: str) -> list[Any]:
        file = finished.path / f"trackers/{BAD}.{kind}/told.jsonl"
        lines = [json.loads(line)[1:] for line in file.read_text().splitlines()]
        return [line[0] if line[0] != "log" else line[1] for line in lines]

    assert steps("Records") == ["start", 0, 1, 2, "finish", "start", 3, "finish"]
    assert steps("FailsInLog") == ["start", 0, 1, "start", 1]  # and fails again


def test_names_are_checked_before_anything_is_loaded(
    recipe_data: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(track: Any) -> Any:
        return build.recipe_from(recipe_data | {"track": track})

    assert of(["wandb"]).track == ["wandb"] and build.recipe_from(recipe_data).track == ["console"]
    for name, meant in (("wandb", r'\["console", "wandb"\]'), ("console", r'\["console"\]')):
        with pytest.raises(
            UserError, match=f'track: expected .* got "{name}"; write track = {meant}'
        ):
            of(name)  # a bare name must not switch the display off unasked
    with pytest.raises(
        UserError, match='unknown tracker "wandbb"; did you mean "wandb"\\? allowed: con'
    ):
        of(["console", "wandbb"])
    with pytest.raises(UserError, match='track lists "wandb" more than once'):
        of(["wandb", "wandb"])
    with pytest.raises(UserError, match=r'unknown key "tracker\.projct"; did you mean "project"'):
        build.recipe_from(recipe_data | {"tracker": {"projct": "x"}})
    with pytest.raises(UserError, match='"nowhere:At" cannot be imported'):
        run.assemble(of(["nowhere:At"]))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match='pip install "gesso\\[swanlab\\]"'):
        run.assemble(of(["swanlab"]))


def test_figures_have_groups_and_are_finite() -> None:
    found = figures_of(
        {"step": 4, "reward": 0.5, "eval/reward": float("inf"), "reward/ocr": 1, "age": None}
        | {"health": ["a", "b"], "time/step": 2.0}
    )
    assert found == {
        "train/reward": 0.5, "reward/ocr": 1.0, "time/step": 2.0, "train/warnings": 2.0,
    }  # fmt: skip


def test_samples_are_read_from_the_run_folder(folder: RunFolder) -> None:
    drawn(folder, 10)
    found = samples_of(folder.path, 10)
    assert [caption(s) for s in found] == [
        'a sign | "KITE" | 1.750',
        "a sea | no score: no letters",
    ]
    assert samples_of(folder.path, 9) == []


def test_the_tracker_of_the_documentation(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "track.md").read_text("utf-8")
    code = text.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "my_tracker.py").write_text(code)
    monkeypatch.chdir(tmp_path)  # beside the recipe, where the command is given
    told = sitting(folder, "my_tracker:Lines", write=lambda: drawn(folder, 4))
    file = folder.path / "trackers/my_tracker.Lines/lines.txt"
    assert told == [f"my_tracker:Lines: {file}"] and file.read_text() == "4 1.0 1.0\n"


def test_the_recipe_and_commands_of_the_documentation(recipe_data: dict) -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "track.md").read_text("utf-8")
    said = tomllib.loads(text.partition("```toml\n")[2].partition("```")[0])
    found = build.recipe_from(recipe_data | said)
    assert (found.track, found.tracker.project) == (["console", "wandb"], "signs")
    for name in build.TRACKERS:
        assert f"\n| `{name}` |" in text


def test_the_source_of_an_edit_is_left_of_the_result(folder: RunFolder) -> None:
    edited(folder, 0)
    (sample,) = samples_of(folder.path, 0)
    expected = np.concatenate([BLUE, RED], axis=1)
    assert (np.asarray(image_of(folder.path, sample)) == expected).all()
    (folder.path / "samples/prompts/000-1.png").write_bytes(b"damaged")
    assert (np.asarray(image_of(folder.path, sample)) == RED).all()

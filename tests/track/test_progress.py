"""Progress: who is told what, in which form; and that a run tells how far it is."""

from __future__ import annotations

import io
import json
import math
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import rich.console
import tomli_w

from gesso import build, cli, run
from gesso.track import bars, console, progress
from gesso.track.console import Console, how_far
from gesso.track.displays import display
from gesso.track.progress import Clock, Json, Silent
from gesso.types import UserError
from tests.waiting import until


class Recorder(Silent):
    """Every phase with how much of it was announced and done."""

    def __init__(self) -> None:
        self.phases: list[list[Any]] = []
        self.rows: list[Mapping[str, Any]] = []
        self.started: list[tuple[int, int]] = []

    def start(self, step: int, total: int) -> None:
        self.started.append((step, total))

    def phase(self, text: str, total: int = 0) -> None:
        self.phases.append([text, total, 0])

    def advance(self, done: int = 1) -> None:
        self.phases[-1][2] += done

    def row(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)

    @property
    def counted(self) -> dict[str, int]:
        return {text: total for text, total, _ in self.phases if total}


def complete(seen: Recorder) -> bool:
    """Whether all that was announced was also done."""
    return all(done == total for _, total, done in seen.phases)


def test_a_run_reports_how_far_it_is(recipe_data: dict, tmp_path: Path) -> None:
    """2 prompts × 3 samples, 3 of 4 steps trained, in two updates; 3 held-out prompts."""
    data = recipe_data | {"steps": 1, "lag": 0}
    data["algorithm"] |= {"updates": 2, "timestep_fraction": 0.75}
    seen = Recorder()
    run.train(build.recipe_from(data), folder=tmp_path / "run", shown=seen)
    assert complete(seen), seen.phases
    assert seen.started == [(0, 1)] and [row["step"] for row in seen.rows] == [0, 1]
    counted = seen.counted
    assert counted.pop(f"loading weights of {data['model']['path']}") > 10  # its text encoders
    assert counted == {
        "sampling the evaluation": 3,
        "scoring the evaluation": 3,
        "sampling batch 1": 6,
        "scoring batch 1": 6,
        "updating": 18,
    }
    told = [text for text, *_ in seen.phases]
    for text in ("loading data", "importing torch", "saving", "writing the report"):
        assert text in told
    assert any(text.startswith("loading ") for text in told)


def test_a_language_model_reports_too(tmp_path: Path) -> None:
    seen = Recorder()
    few = ["steps=1", "data.groups=2", "eval.prompts=4", "algorithm.epochs=2"]
    run.train("demo-vlm", few, tmp_path / "run", shown=seen)
    assert complete(seen), seen.phases
    assert seen.counted["sampling batch 1"] == 16 and seen.counted["updating"] == 32
    assert seen.counted["tokenizing prompts"] == 2000
    assert seen.counted["loading weights of zoo:shapes"] > 50


def test_time_left_goes_by_the_phase_itself() -> None:
    doing = Clock("updating", 40)
    assert doing.left is None
    doing.done, doing.since = 10, time.monotonic() - 5.0
    assert doing.left == pytest.approx(15.0, abs=0.2)
    assert how_far(doing) == "10/40, 0:15 left"
    doing.done = 40
    assert doing.left is None and how_far(doing) == "40/40"
    fresh, unknown, large = Clock("x", 40), Clock("x"), Clock("x", 4 * 10**9)
    fresh.since = unknown.since = time.monotonic() - 65.0
    large.done, large.since = 10**9, time.monotonic() - 10.0
    assert how_far(fresh) == "0/40, 1:05 so far" and how_far(unknown) == "1:05"
    assert how_far(large) == "1.0G/4.0G, 0:30 left"
    unknown.done = 45 * 10**6
    assert how_far(unknown) == "45M, 1:05"


def plain() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(rich.console.Console(file=file, width=40)), file


def test_plain_lines_tell_of_long_phases_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown, file = plain()
    shown._ticker = Still()  # type: ignore[assignment]
    shown.phase("loading data")
    for seconds in (0, 3, 1.9):
        now[0] += seconds
        shown.report()
    shown.phase("evaluating", 320)  # the short one was never mentioned
    for seconds, done in ((4.9, 64), (0.2, 64), (4, 0), (1, 64), (0, 128)):
        now[0] += seconds
        shown.advance(done)
        shown.report()
    assert file.getvalue().splitlines() == [
        "evaluating 128/320, 0:08 left",
        "evaluating 192/320, 0:07 left",
    ]
    now[0] += 3600
    shown.report()
    now[0] += console.MAX_PAUSE + 0.1
    shown.report()
    assert len(file.getvalue().splitlines()) == 4


class Still:
    """No clock ticks."""

    def stop(self) -> None: ...


def test_a_long_phase_is_reported_without_any_further_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "REPORT_AFTER", 0.5)
    shown, file = plain()
    with shown:
        shown.phase("loading zoo:signs")
        until(file.getvalue, limit=60)
    assert re.fullmatch(r"(loading zoo:signs 0:\d\d\n)+", file.getvalue())
    told = file.getvalue()
    time.sleep(1.2)
    assert file.getvalue() == told  # nothing ticks on after the end


def test_a_terminal_shows_bar_share_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    file = io.StringIO()
    out = rich.console.Console(
        file=file, force_terminal=True, width=70, record=True, _environ={"TERM": "xterm"}
    )
    with Console(out) as shown:
        shown.phase("evaluating", 320)
        assert shown.doing is not None and shown.live is not None
        shown.advance(160)
        shown.doing.since -= 12.0
        shown.live.refresh()
        drawn = out.export_text()
        assert re.search(r"evaluating [━╺]+ 160/320, 0:1\d left", drawn)
        shown.result("a.png", {"files": ["a.png"]})
        assert shown.live is None
    assert capsys.readouterr().out == "a.png\n"  # on stdout, not where the display was
    assert "step" not in out.export_text()  # it was no run: nothing stays behind


def test_advance_may_come_from_any_thread() -> None:
    for shown in (plain()[0], Json(io.StringIO(), every=0.0)):
        shown.phase("scoring", 8000)
        threads = [
            threading.Thread(target=lambda: [shown.advance() for _ in range(1000)])  # noqa: B023
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert shown.doing is not None and shown.doing.done == 8000


def test_json_is_one_event_a_line() -> None:
    out = io.StringIO()
    shown = Json(out, every=3600.0)
    with shown:
        shown.start(0, 2)
        shown.phase("sampling", 4)
        shown.advance()  # too soon to be told
        shown.row({"step": 1, "reward": math.nan, "health": ["a"], "deep": {"x": [math.inf, 1]}})
        shown.note("line one\nline two")
        shown.every = 0.0
        shown.advance()
        shown.result("for a person", {"run": "x"})
        shown.error("stopped: disk full", 3)
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    left = events[4].pop("left")
    assert isinstance(left, float)
    assert events == [
        {"event": "start", "step": 0, "total": 2},
        {"event": "phase", "text": "sampling", "total": 4},
        {"event": "row", "step": 1, "reward": None, "health": ["a"], "deep": {"x": [None, 1]}},
        {"event": "note", "text": "line one\nline two"},
        {"event": "progress", "text": "sampling", "done": 2, "total": 4},
        {"event": "result", "run": "x"},
        {"event": "error", "text": "stopped: disk full", "code": 3},
    ]


def test_the_options_choose_the_display(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(display(as_json=True), Json)
    aside, own = display(), display(aside=False)
    assert isinstance(aside, Console) and aside.out.stderr
    assert isinstance(own, Console) and not own.out.stderr
    with display(quiet=True) as shown:
        shown.phase("sampling", 3)
        shown.note("careful")
        shown.row({"step": 1})
        shown.result("the result", {})
    assert capsys.readouterr() == ("the result\n", "")


def test_transformers_counts_in_our_display() -> None:
    from transformers.utils import logging

    seen = Recorder()
    logging.disable_progress_bar()
    try:
        with bars.loading(seen, "a model", "zoo:shapes"):
            assert list(logging.tqdm({"a": 1, "b": 2}.items(), desc="Loading weights")) == [
                ("a", 1), ("b", 2),
            ]  # fmt: skip
            assert list(logging.tqdm([1, 2], desc="Something else")) == [1, 2]
        assert list(logging.tqdm([1], desc="Loading weights")) == [1]  # no hook is left
    finally:
        logging.enable_progress_bar()
    assert seen.phases == [
        ["loading a model", 0, 0],
        ["loading weights of a model", 2, 2],
        ["loading a model", 0, 0],
    ]


def test_compiling_is_reported_once() -> None:
    import torch

    class Noted(Recorder):
        def note(self, text: str) -> None:
            self.phases.append(text)  # type: ignore[arg-type]

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    seen = Noted()
    with bars.compiling(seen):
        for size in (2, 3):
            torch.compile(double, backend="eager", dynamic=False)(torch.ones(size))
    torch.compile(double, backend="eager", dynamic=False)(torch.ones(4))
    torch._dynamo.reset()
    assert len(seen.phases) == 1 and str(seen.phases[0]).startswith("compiling")


def test_a_download_counts_what_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(bars, "POLL", 0.02)
    folder = tmp_path / "models--org--name" / "blobs"
    folder.mkdir(parents=True)
    (folder / "there").write_bytes(b"x" * 100)  # of an earlier try
    seen = Recorder()

    with bars.loading(seen, "my run", "org/name"):
        time.sleep(0.2)
        (folder / "a.incomplete").write_bytes(b"x" * 3000)
        until(lambda: seen.phases[-1][2] >= 3000, limit=60)
        (folder / "a.incomplete").rename(folder / "a")
        (folder / "b.incomplete").write_bytes(b"x" * 4000)
        until(lambda: seen.phases[-1][2] >= 7000, limit=60)
    assert seen.phases == [["loading my run", 0, 0], ["downloading my run", 0, 7000]]


@pytest.mark.parametrize("path", ["./gone", "/gone", "my models/a b"])
def test_a_path_that_the_hub_cannot_have_is_left_to_the_loader(path: str) -> None:
    with pytest.raises(UserError, match="no such folder"), bars.loading(Recorder(), "it", path):
        raise UserError("no such folder")


def test_the_command_line_in_json_and_in_silence(
    recipe_data: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, folder = tmp_path / "recipe.toml", str(tmp_path / "run")
    recipe.write_text(tomli_w.dumps(recipe_data | {"steps": 1}))
    assert cli.main(["train", str(recipe), "--run", folder, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    events = [json.loads(line) for line in out.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "phase" and kinds[-1] == "result" and kinds.count("row") == 2
    assert events[-1]["run"] == folder and events[-1]["last"]["step"] == 1
    assert cli.main(["train", str(recipe), "--run", folder, "--json"]) == 2
    out, err = capsys.readouterr()
    event = json.loads(out)
    assert err == "" and (event["event"], event["code"]) == ("error", 2)
    assert "already exists" in event["text"]
    assert cli.main(["train", "--resume", folder, "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("\nheld-out") and out.endswith("report.html\n") and err == ""
    with pytest.raises(SystemExit):
        cli.main(["train", str(recipe), "--json", "--quiet"])
    assert "not allowed with" in capsys.readouterr().err

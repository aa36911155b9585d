from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gesso.track.run_folder import RunFolder
from gesso.types import Prompt, Sample, Score
from gesso.viewer.reading import RunReader
from gesso.viewer.thinning import spread, thinned
from tests.typed import sure
from tests.viewer import folders


def test_a_line_of_the_table(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "a", 4)
    told = RunReader(run.path).summary()
    assert (told["name"], told["algorithm"], told["model"]) == ("a", "flow-grpo", "zoo:signs")
    assert (told["step"], told["steps"], told["reward"], told["best"]) == (4, 10, 0.4, 0.4)
    held_out = {"key": "eval/reward", "first": 0.3, "now": 0.5, "best": 0.5}
    assert told["held_out"] == pytest.approx(held_out)
    assert told["samples_per_s"] == 12.0 and told["seconds"] == 10.0
    assert told["state"] == "running" and told["left"] == pytest.approx(2.0 * 6)
    assert told["health"] == {"level": "green", "kinds": [], "sentences": []}
    assert told["family"] == "flow" and told["recipe"] == ""


def test_best_is_not_the_latest(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "a", 3)
    run.append(folders.row(4, reward=0.1, **{"eval/reward": 0.2}))
    told = RunReader(run.path).summary()
    assert (told["reward"], told["best"]) == (0.1, 0.3)
    assert (told["held_out"]["now"], told["held_out"]["best"]) == pytest.approx((0.2, 0.4))


def test_a_run_that_writes_no_more_has_stopped(tmp_path: Path) -> None:
    reader = RunReader(folders.make(tmp_path / "a", 4).path)
    written = reader.summary()["changed"]
    assert reader.summary(written + 59)["state"] == "running"
    late = reader.summary(written + 61)
    assert late["state"] == "stopped" and late["left"] is None
    run = folders.make(tmp_path / "slow", 1)
    run.append(folders.row(2, **{"time/step": 100.0}))
    slow = RunReader(run.path)  # a step takes 100 s
    written = slow.summary()["changed"]
    assert slow.summary(written + 499)["state"] == "running"
    assert slow.summary(written + 501)["state"] == "stopped"
    assert RunReader(folders.make(tmp_path / "b", 10).path).summary()["state"] == "finished"


@pytest.mark.parametrize(
    ("kinds", "level"), [(["flat-groups"], "amber"), (["flat-groups", "kl-explodes"], "red")]
)
def test_health_has_the_sentence_that_was_reported(
    tmp_path: Path, kinds: list[str], level: str
) -> None:
    run = folders.make(tmp_path / "a", 1)
    run.note("step 2: warning (flat-groups): all groups are flat; use another reward")
    run.append(folders.row(2, health=kinds))
    told = RunReader(run.path).summary()["health"]
    assert (told["level"], told["kinds"]) == (level, kinds)
    assert (
        told["sentences"]
        == ["all groups are flat; use another reward", "kl-explodes"][: len(kinds)]
    )


def test_a_stopped_run_is_red_with_the_reason_until_it_goes_on(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "a", 1)
    run.note("stopped: the reward is dead; mend it")
    run.note("tracker wandb is switched off: no answer")  # trackers end after the run
    told = RunReader(run.path).summary()
    assert (told["state"], told["left"]) == ("stopped", None), "though its files are new"
    health = told["health"]
    assert (health["level"], health["sentences"]) == ("red", ["the reward is dead; mend it"])
    run.note("resumed after step 1")
    told = RunReader(run.path).summary()
    assert (told["state"], told["health"]["level"]) == ("running", "green")
    run.note("step 2: warning (x): sampling stopped: a word in a sentence")
    assert RunReader(run.path).summary()["state"] == "running"


def test_metrics_are_read_on_from_where_they_were(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "a", 2)
    reader = RunReader(run.path)
    assert len(reader.rows()) == 3
    file = run.metrics_file
    half = json.dumps(folders.row(3)).encode()
    with file.open("ab") as opened:
        opened.write(half[:20])
    assert len(reader.rows()) == 3 and reader.damaged() == []  # still being written
    with file.open("ab") as opened:
        opened.write(half[20:] + b"\n")
    assert [row["step"] for row in reader.rows()] == [0, 1, 2, 3]
    run.rewind(1)  # resumed from step 1: the file is another one, and shorter
    assert [row["step"] for row in reader.rows()] == [0, 1]
    run.append(folders.row(2, reward=0.9))
    assert reader.rows()[-1]["reward"] == 0.9


def test_of_a_step_written_twice_the_later_counts(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "a", 3)
    run.append(folders.row(2, reward=0.9))
    rows = RunReader(run.path).rows()
    assert [row["step"] for row in rows] == [0, 1, 2] and rows[-1]["reward"] == 0.9


def test_damage_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "a", 2)
    with run.metrics_file.open("ab") as opened:
        opened.write(b'{"step": 3, "rew\n[]\n')
    run.append(folders.row(4))
    folders.evaluate(run, 2, ["one", "two"])
    with (run.path / "samples" / "000002.jsonl").open("ab") as opened:
        opened.write(b'{"index": 2}\n')
    reader = RunReader(run.path)
    assert [row["step"] for row in reader.rows()] == [0, 1, 2, 4]
    assert len(reader.evolution()["prompts"]) == 2
    assert reader.damaged() == [
        "metrics.jsonl: a damaged line after step 2, skipped",
        "metrics.jsonl: a damaged line after step 2, skipped",
        "000002.jsonl, line 3: incomplete or damaged, skipped",
    ]


def test_a_run_of_another_version_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "config.toml").write_text('model = "sd3"\nalgorithm = 3\nsteps = "many"\n')
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5, "health": "?"}\n')
    told = RunReader(folder).summary()
    assert (told["reward"], told["steps"], told["state"]) == (0.5, None, "unknown")
    assert told["algorithm"] == "" and told["left"] is None
    (folder / "config.toml").write_text("not = = toml")
    reader = RunReader(folder)
    assert reader.summary()["reward"] == 0.5
    assert reader.damaged()[0].startswith("config.toml cannot be read: ")
    assert RunReader(tmp_path / "gone").summary()["step"] == 0


def test_evolution_has_a_cell_for_every_prompt_and_evaluation(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "a", 4)
    folders.evaluate(run, 0, ["one", "two"])
    folders.evaluate(run, 4, ["one"])
    found = RunReader(run.path).evolution()
    assert found["steps"] == [0, 4]
    one, two = found["prompts"]
    assert (one["prompt"], one["seed"], one["index"]) == ("one", "7", 0)
    assert [cell["reward"] for cell in one["cells"]] == [0.0, 0.4]
    assert one["cells"][1]["image"] == "samples/000004/000.png"
    assert one["cells"][1]["text"] == "READ"
    assert two["cells"][0]["image"] == "samples/000000/001.png" and two["cells"][1] is None


def test_evolution_of_responses(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "a", 2, model={"name": "causal", "path": "x"})
    for step, response in ((0, "There are 3."), (2, "<answer>3</answer>")):
        sample = Sample(Prompt("How many?", columns={"answer": "3"}), None, 1, response)
        parts = {"count": step / 2, "count/exact": step / 2}
        run.save_samples(step, [sample], [Score(step / 2, parts)])
    reader = RunReader(run.path)
    assert reader.summary()["family"] == "language"
    (row,) = reader.evolution()["prompts"]
    assert row["answer"] == "3"
    assert [cell["response"] for cell in row["cells"]] == ["There are 3.", "<answer>3</answer>"]
    assert [cell["right"] for cell in row["cells"]] == [False, True]


def test_an_evaluation_written_again_is_read_again(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "a", 2)
    folders.evaluate(run, 2, ["one"])
    reader = RunReader(run.path)
    assert len(reader.evolution()["prompts"]) == 1
    folders.evaluate(run, 2, ["one", "two"])
    assert len(reader.evolution()["prompts"]) == 2


def test_curves_against_steps_samples_and_seconds(tmp_path: Path) -> None:
    reader = RunReader(folders.make(tmp_path / "a", 3).path)
    found = reader.curves(["reward", "eval/reward", "nothing"], 100)
    assert set(found["series"]) == {"reward", "eval/reward"} and found["step"] == 3
    line = found["series"]["reward"]
    assert line["step"] == [1, 2, 3] and line["y"] == [0.1, 0.2, 0.3]
    assert line["samples"] == [24, 48, 72]  # 4 groups of 6
    assert line["seconds"] == [4.0, 6.0, 8.0]
    assert "low" not in line
    assert {"time/step", "health"} & set(reader.keys()) == {"time/step"}


def test_thinning_keeps_means_and_extremes() -> None:
    points = [(i, float(i % 10)) for i in range(1000)]
    points[500] = (500, 99.0)
    points[505] = (505, -99.0)
    line = thinned(points, 100)
    assert min(line["low"]) == -99.0
    assert len(line["y"]) == 100 and line["step"][-1] == 999
    assert line["y"][0] == pytest.approx(4.5) and (line["low"][0], line["high"][0]) == (0.0, 9.0)
    assert max(line["high"]) == 99.0
    assert sum(line["y"]) / 100 == pytest.approx(sum(v for _, v in points) / 1000)


def test_spread_keeps_both_ends() -> None:
    assert spread(range(5), 9) == [0, 1, 2, 3, 4]
    assert spread(range(100), 4) == [0, 33, 66, 99]


def test_groups_tell_where_the_gradient_came_from(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "a", 2)
    folders.batch(run, 2, [0.1, -0.1, 0.5, -0.2, 0.05, 0.05], keep=2)
    reader = RunReader(run.path)
    assert reader.group_steps() == [2]
    found = reader.groups(2)
    assert [group["group"] for group in found] == [1, 0, 2]  # the largest share first
    assert [group["share"] for group in found] == pytest.approx([0.7, 0.2, 0.1])
    best = found[0]
    assert (best["prompt"], best["mean"]) == ("prompt 1", pytest.approx(0.35))
    assert [s["advantage"] for s in best["samples"]] == pytest.approx([0.5, -0.2])
    assert [s["share"] for s in best["samples"]] == pytest.approx([0.5, 0.2])
    assert best["samples"][0]["image"] == "groups/000002/001-00.webp"
    assert "image" not in found[2]["samples"][0]  # only the first two are kept
    shown = folders.open_picture(run.path / best["samples"][0]["image"])
    assert shown.size == (24, 8) and abs(sure(tuple, shown.getpixel((3, 3)))[0] - 20) < 8
    assert reader.groups(99) == []


def test_a_batch_without_any_gradient_divides_by_nothing(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "a", 1)
    folders.batch(run, 1, [0.0, 0.0])
    assert RunReader(run.path).groups(1)[0]["share"] == 0.0


def test_a_file_written_anew_is_read_anew_though_it_is_longer(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "a", 2)
    reader = RunReader(run.path)
    assert len(reader.rows()) == 3
    run.rewind(0)
    for step in range(1, 6):
        run.append(folders.row(step, reward=0.9))
    assert [row.get("reward") for row in reader.rows()] == [None] + [0.9] * 5


def test_of_a_warning_reported_twice_the_later_sentence_counts(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "a", 1)
    for share in (50, 90):
        run.note(f"step 2: warning (flat-groups): {share}% are flat")
    run.append(folders.row(2, health=["flat-groups"]))
    assert RunReader(run.path).summary()["health"]["sentences"] == ["90% are flat"]


def test_time_left_goes_by_the_steps_alone(tmp_path: Path) -> None:
    """Row 0 is an evaluation, which may take long."""
    run = folders.make(tmp_path / "a", 0)
    run.append(folders.row(1))
    run.path.joinpath("metrics.jsonl").write_text(
        "".join(
            json.dumps(folders.row(step, **{"time/step": 100.0 if step == 0 else 2.0})) + "\n"
            for step in (0, 1, 2)
        )
    )
    assert RunReader(run.path).summary()["left"] == pytest.approx(2.0 * 8)


def test_large_images_of_groups_are_kept_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "picture", lambda shade: np.full((300, 600, 3), shade, np.uint8))
    run = folders.make(tmp_path / "a", 1)
    folders.batch(run, 1, [0.5])  # a group of one has no spread, and is none the worse
    (group,) = RunReader(run.path).groups(1)
    assert group["std"] == 0.0
    shown = folders.open_picture(run.path / group["samples"][0]["image"])
    assert shown.size == (256, 128)


def test_the_recipe_a_run_was_started_by_stays_known(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "a", folders.CONFIG, "demo")
    reader = RunReader(run.path)
    assert reader.summary()["recipe"] == "demo"
    run.write_config(folders.CONFIG | {"steps": 20})  # as a resume to other steps does
    assert reader.summary()["recipe"] == "demo" and reader.summary()["steps"] == 20


def test_time_left_goes_by_the_latest_steps(tmp_path: Path) -> None:
    """The first may compile, or wait for weights."""
    run = folders.make(tmp_path / "a", 0)
    for step in range(1, 16):
        run.append(folders.row(step, **{"time/step": 1000.0 if step <= 5 else 2.0}))
    run.write_config(folders.CONFIG | {"steps": 20})
    assert RunReader(run.path).summary()["left"] == pytest.approx(2.0 * 5)


def test_a_run_is_alive_while_it_writes_its_log(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "a", 2)
    for name in ("config.toml", "metrics.jsonl"):
        os.utime(run.path / name, (0, 0))
    reader = RunReader(run.path)
    assert reader.summary()["state"] == "stopped"
    run.note("step 3: 2 of 24 scores failed")
    assert reader.summary()["state"] == "running"


def test_the_log_is_reported_from_its_end(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "a", 1)
    (run.path / "log.txt").write_text("".join(f"line {i}\n" for i in range(1000)))
    told = RunReader(run.path).log()
    assert len(told) == 300 and told[-1] == "line 999"


def test_metrics_cut_short_in_place_are_read_anew(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "a", 4)
    reader = RunReader(run.path)
    assert len(reader.rows()) == 5
    first = run.metrics_file.read_bytes().splitlines(keepends=True)[0]
    os.truncate(run.metrics_file, len(first))
    assert [row["step"] for row in reader.rows()] == [0]


def test_the_small_curve_is_of_training_and_ends_now(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "a", 0)
    for step in range(1, 102):
        run.append(folders.row(step, reward=step / 1000, **{"eval/reward": 0.9}))
    spark = RunReader(run.path).summary()["spark"]
    assert len(spark) <= 40 and spark[-1] == 0.101 and max(spark) < 0.9


def test_a_thinned_curve_reports_how_many_rows_it_is_of(tmp_path: Path) -> None:
    line = RunReader(folders.make(tmp_path / "a", 9).path).curves(["reward"], 3)["series"]["reward"]
    assert len(line["y"]) == 3 and line["count"] == 9


def test_prompts_stay_in_order_and_apart_by_seed(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "a", 2)
    folders.evaluate(run, 0, ["one", "two"])
    file = run.path / "samples" / "000000.jsonl"
    first, second = file.read_text().splitlines()
    file.write_text(f"{second}\n")  # the first was not kept
    other = first.replace('"seed": 7', '"seed": 8')
    (run.path / "samples" / "000002.jsonl").write_text(f"{first}\n{other}\n")
    found = RunReader(run.path).evolution()["prompts"]
    assert [(p["prompt"], p["seed"]) for p in found] == [("one", "7"), ("one", "8"), ("two", "8")]


def test_the_size_is_that_of_all_images_that_can_be_read(tmp_path: Path) -> None:
    run = folders.make(tmp_path / "a", 0)
    folders.evaluate(run, 0, ["one", "two"])
    image = run.path / "samples/000000/000.png"
    with Image.open(image) as opened:
        opened.transpose(Image.Transpose.ROTATE_90).save(image)
    assert RunReader(run.path).evolution()["size"] == [24, 24]  # of both
    image.write_bytes(b"no picture")
    assert RunReader(run.path).evolution()["size"] == [24, 8]

"""Scores with intervals: what the run itself has measured, and differences sample by sample."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gesso
from gesso import build, cli
from gesso.run import train
from gesso.types import Prompt, Sample, Score, UserError
from gesso.use.evaluate import (
    Evaluation,
    EvaluationRequest,
    evaluate_all,
    reward_entry,
    summary,
    table,
)
from gesso.use.source import find
from gesso.use.trained import load
from tests import pipelines, tokens
from tests.use import runs

LENGTH, BRIGHT = "tests.use.rewards:length", "tests.use.rewards:brightness"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("evaluated")
    pipelines.build("sd3", root / "sd3")
    tokens.build("qwen2", root / "qwen2")
    return root


@pytest.fixture(scope="module")
def run(folders: Path) -> Path:
    data = runs.draws("sd3", folders / "sd3", lora=True)
    return runs.make(data | {"reward": [{"name": BRIGHT}]}, folders / "run", 0.2).path


def made(name: str, values: Sequence[Sequence[float | None]]) -> Evaluation:
    """values: of each prompt, of each of its samples; None is a failure."""
    prompts = [Prompt(f"prompt {i}") for i in range(len(values))]
    flat = [(i, v) for i, row in enumerate(values) for v in row]
    scores = [Score.failed("it fell over") if v is None else Score(v, {"ocr": v}) for _, v in flat]
    samples = [Sample(prompts[i], None, 0, "x") for i, _ in flat]
    return Evaluation(name, prompts, samples, scores, [i for i, _ in flat])


def test_a_failure_is_never_a_number() -> None:
    one = made("one", [[1.0, None], [0.0, 0.5], [None, None]])
    assert one.values() == [1.0, None, 0.0, 0.5, None, None]
    assert one.interval().mean == pytest.approx(1.5 / 3)
    assert one.errors == ["it fell over"] * 3 and one.figures == ["ocr"]
    told = table([one])
    assert "(3 of 6 scores failed, 50.0%; they are excluded)" in told
    assert "one: last error: it fell over" in told
    nothing = made("nothing", [[None], [None]])
    assert nothing.figures == ["reward"] and math.isnan(nothing.interval().mean)
    assert "–" in table([nothing]) and summary([nothing])["models"][0]["failed"] == 2
    assert summary([nothing])["models"][0]["figures"]["reward"]["mean"] is None


def test_differences_are_between_samples_of_one_seed() -> None:
    """Prompts differ by far more than the models do: only pairs can tell."""
    base = [[float(10 * i + j) for j in range(2)] for i in range(8)]
    better = [[v + 1 + (i % 2) / 10 for v in row] for i, row in enumerate(base)]
    a, b = made("a", better), made("b", base)
    difference, pairs = a.minus(b)
    assert pairs == 16 and difference.mean == pytest.approx(1.05)
    assert difference.error < 0.03 < 5 < a.interval().error
    assert difference.low > 1
    torn = made("b", [[None, *row[1:]] for row in base])
    difference, pairs = a.minus(torn)
    assert pairs == 8 and difference.mean == pytest.approx(1.05)
    assert "8 pairs" in table([a, torn]) and "a minus b, paired by prompt" in table([a, b])


def test_samples_of_a_prompt_are_no_independent_evidence() -> None:
    values = [[float(i % 3)] for i in range(12)]
    once, often = made("once", values), made("often", [row * 16 for row in values])
    assert often.interval() == once.interval()


def test_it_is_what_the_run_measured(recipe_data: dict, tmp_path: Path) -> None:
    recipe_data |= {"steps": 2, "optimizer": {"lr": 1e-2}}
    recipe_data["learner"] |= {"ema": {"every": 1, "decay": 0.5}}
    finished = train(build.recipe_from(recipe_data), folder=tmp_path / "run", quiet=True)
    first, *_, last = (row for row in finished.rows() if "eval/reward" in row)
    found = evaluate_all([find(tmp_path / "run"), find(tmp_path / "run").base], EvaluationRequest())
    assert found[0].interval().mean == pytest.approx(last["eval/reward"], abs=1e-9)
    assert found[1].interval().mean == pytest.approx(first["eval/reward"], abs=1e-9)
    from PIL import Image

    kept = Image.open(tmp_path / "run" / "samples" / "000002" / "001.png")
    assert kept.tobytes() == found[0].samples[1].pixels.tobytes()


def test_more_samples_have_seeds_of_their_own(run: Path) -> None:
    trained = load(run)
    one, two = (trained.evaluate([LENGTH], ["oak", "a cat"], n=n, seed=4) for n in (1, 3))
    assert [s.seed for s in two.samples[::3]] == [s.seed for s in one.samples]
    assert len({s.seed for s in two.samples}) == 6
    again = two.samples[3].pixels.astype(int) - one.samples[1].pixels
    assert abs(again).max() <= 1  # a batch of another size rounds otherwise
    assert two.values() == [3.0] * 3 + [5.0] * 3 and two.interval().mean == 4
    with pytest.raises(UserError, match="eval expects n of at least 1, got n = 0"):
        trained.evaluate([LENGTH], ["oak"], n=0)
    with pytest.raises(UserError, match="eval expects first of at least 1, got first = 0"):
        trained.evaluate([LENGTH], ["oak"], first=0)


def test_from_the_command_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from PIL import Image

    def said(*more: Any) -> str:
        capsys.readouterr()
        assert cli.main(["eval", str(run), "--quiet", *map(str, more)]) == 0
        return capsys.readouterr().out

    told = said("--base", "--out", tmp_path / "out", "--n", "2")
    assert "3 prompts × 2" in told and "(2 of 6 scores failed, 33.3%" in told
    assert f"{run} step 4 minus base {find(run).recipe.model.path}, paired by prompt" in told
    data = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert [m["failed"] for m in data["models"]] == [2, 2] and data["prompts"] == 3
    (difference,) = data["differences"]
    (figure,) = difference["figures"].values()
    assert figure["pairs"] == 4 and figure["low"] <= figure["mean"] <= figure["high"] != 0
    lines = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 12 and sum(row["reward"] is None for row in rows) == 4
    assert {row["error"] for row in rows} == {None, f"{BRIGHT}: no oaks"}
    assert all(Image.open(tmp_path / "out" / row["image"]).size == (16, 24) for row in rows)
    assert Image.open(tmp_path / "out" / "sheet.png").width > 300
    means = [np.mean([r["reward"] for r in rows[s] if r["reward"] is not None])
             for s in (slice(0, 6), slice(6, 12))]  # fmt: skip
    assert figure["mean"] == pytest.approx(means[0] - means[1])
    one = said("--prompts", runs.PROMPTS, "--first", "2", "--reward", LENGTH, "--step", "2", run)
    assert "2 prompts × 1" in one and "12.000" in one  # (9 + 15) / 2 letters
    assert f"{run} step 2 minus {run} step 4" in one and "+0.000" in one


def test_what_cannot_be_evaluated(
    run: Path, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def said(*arguments: Any) -> str:
        capsys.readouterr()
        assert cli.main(["eval", *map(str, arguments), "--quiet"]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    told = said(folders / "sd3")
    assert "has no recipe, so prompts and rewards must be specified; add --prompts" in told
    assert "has no recipe, so rewards must" in said(folders / "sd3", "--prompts", runs.PROMPTS)
    assert "cannot compare flow models with language models" in said(run, folders / "qwen2")
    assert 'unknown reward "ocrr"; did you mean "ocr"?' in said(run, "--reward", "ocrr")
    assert "no such file" in said(run, "--prompts", tmp_path / "none.txt")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").touch()
    assert "already exists; choose a new or empty folder" in said(run, "--out", tmp_path / "full")
    within = tmp_path / "full" / "kept" / "more"
    assert f"folder {within} cannot be created: kept is a file" in said(run, "--out", within)


def test_prompts_that_only_one_of_two_takes(folders: Path, tmp_path: Path) -> None:
    tiny = tokens.Tiny("qwen2", folders / "qwen2")
    wide = runs.make(runs.writes(tiny, True, {"name": "grpo"}), tmp_path / "wide").path
    data = runs.writes(tiny, True, {"name": "grpo"}, max_prompt=20)
    narrow = runs.make(data, tmp_path / "narrow").path
    asked = EvaluationRequest(("format",), ["how many?", "word " * 20])
    with pytest.raises(UserError, match="do not accept the same prompts; remove this prompt"):
        evaluate_all([find(wide), find(narrow)], asked)
    several = gesso.load(wide).evaluate(n=4)  # greedy responses would all be the same
    assert len({sample.text for sample in several.samples[:4]}) > 1


def test_rewards_by_name(folders: Path) -> None:
    recipe = build.recipe("demo")
    assert reward_entry("ocr", recipe).options["detect"] is False  # as the recipe has it
    assert reward_entry("ocr,detect=true", recipe).options["detect"] is True
    assert reward_entry("jpeg-compressibility", recipe).name == "jpeg-compressibility"

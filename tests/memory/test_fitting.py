"""`gesso check --fit` finds the largest batches that fit a GPU, with few estimates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gesso import build, cli, fitting
from gesso.config import Recipe
from gesso.estimate import Memory, usable
from gesso.families.flow import FlowFamily
from gesso.fitting import fit, largest
from gesso.types import UserError
from tests import tokens as writers

GB = 10**9
MULTIPLES = range(8, 8 * 400, 8)
DIVISORS = [n for n in range(1, 577) if 576 % n == 0]


def memory(peak: float) -> Memory:
    return Memory({"network": 0}, {"update": int(peak)}, {}, copy=0)


@pytest.mark.parametrize("values", [MULTIPLES, DIVISORS], ids=["multiples", "divisors"])
@pytest.mark.parametrize("limit", [12.0, 40.0, 123.4, 999.0, 10_000.0])
@pytest.mark.parametrize(
    "peak",
    [
        lambda n: 3 + n,
        lambda n: max(10, n),  # something else is larger for small batches
        lambda n: max(10 + n // 10, n - 50),
        lambda n: 8 + n // 40 * 40,  # in steps
    ],
    ids=["line", "floor", "kink", "steps"],
)
def test_the_largest_value_is_found(
    peak: Callable[[int], int], limit: float, values: list[int]
) -> None:
    calls: list[int] = []

    def counted(value: int) -> int:
        calls.append(value)
        return peak(value)

    result = largest(values, counted, limit)
    assert result == max(value for value in values if peak(value) < limit)
    assert len(calls) == len(set(calls)) <= 12
    if peak(7) == 10:  # linear: two to know the slope, the result and the next one
        assert len(calls) <= 6


def test_one_value_is_enough() -> None:
    assert largest([7], lambda value: 3, 10) == 7


@pytest.fixture
def estimated(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """Recipes that were estimated, by a formula."""
    recipes: list[Recipe] = []

    def estimate(recipe: Recipe, images: None) -> Memory:
        recipes.append(recipe)
        updating = max(recipe.learner.micro_batch, recipe.learner.micro_tokens / 1024)
        return memory((10 + max(updating, recipe.sampler.batch / 4)) * GB)

    monkeypatch.setattr(fitting, "estimate", estimate)
    return recipes


def test_batches_of_images_are_equal_and_full(estimated: list[Recipe]) -> None:
    changes = ["learner.micro_tokens=1", "data.groups=12", "algorithm.group=10"]
    changes += ["algorithm.updates=2"]
    fitted = fit(build.recipe("demo", changes), 24)  # 23.19 GB: 13 of the 60 of an update
    assert fitted.settings == {"sampler.batch": 12, "learner.micro_batch": 12}
    assert fitted.memory.peak == 22 * GB and len(estimated) <= 5
    assert all(r.sampler.batch == r.learner.micro_batch for r in estimated)
    one = build.recipe("demo", [*changes, "algorithm.updates=1", "data.groups=1"])
    assert fit(one, 80).settings["sampler.batch"] == 10  # all of them


def test_responses_and_tokens_are_sized_separately(
    estimated: list[Recipe], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = f"model.path={writers.build('qwen2', tmp_path / 'm')}"
    prompts = tmp_path / "a.txt"
    prompts.write_text("how many\n", encoding="utf-8")
    words = [path, f"data.train={prompts}", f"data.eval={prompts}", "model.name=causal"]
    words += ["model.max_prompt=2048", "algorithm.max_tokens=1000", "learner.micro_batch=1"]
    words += ["sampler.batch=3"]
    recipe = build.recipe("demo-vlm", words)
    fitted = fit(recipe, 24)
    assert fitted.settings == {"sampler.batch": 48, "learner.micro_tokens": 13 * 1024}
    assert fitted.prompts.startswith("prompts of at most ")
    assert {r.learner.micro_tokens for r in estimated if r.sampler.batch < 48} == {1024}
    vllm = build.recipe("demo-vlm", [*words, "sampler.engine=vllm"])
    assert fit(vllm, 24).settings == {"learner.micro_tokens": 13 * 1024}
    capsys.readouterr()
    assert cli.main(["check", "demo-vlm", "--fit", "24", "--json", *words]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["overrides"] == ["sampler.batch=48", "learner.micro_tokens=13312"]
    (command,) = (text for name, text in told["facts"] if name == "fit")
    assert command.endswith("learner.micro_batch=1 sampler.batch=48 learner.micro_tokens=13312")
    assert "sampler.batch=3" not in command


def test_the_settings_of_a_card_are_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(
        fitting, "estimate", lambda recipe, images: memory(recipe.sampler.batch * GB)
    )
    assert cli.main(["check", "flux-pickscore", "--card", "24", "--fit", "16", "--quiet"]) == 0
    told = capsys.readouterr().out
    settings = "sampler.batch=12 learner.micro_batch=12"
    assert f"fit      gesso train flux-pickscore --card 24 {settings}\n" in told
    assert "memory   about 12.0 GB at the peak" in told


def test_what_does_not_fit_says_what_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "estimate", lambda recipe, images: memory(30 * GB))
    with pytest.raises(UserError) as caught:
        fit(build.recipe("sd35-ocr"), 24)
    assert str(caught.value) == (
        "even sampler.batch=1 learner.micro_batch=1 needs about 30.0 GB, but a GPU of 24 GB leaves "
        "23.2 GB; try model.gradient_checkpointing=true, model.fold=false, model.quantize=nf4, "
        "data.groups below 48 or a larger GPU"
    )
    with pytest.raises(UserError, match=r"; try model.lora.rank=16, data.groups below 512 or a"):
        fit(build.recipe("qwen25-vl-3b-geo3k"), 24)


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--fit 0", "error: --fit expects the memory of a GPU in GB, at least 1, got 0"),
        ("--fit -3", "at least 1, got -3"),
        ("--fit abc", "argument --fit: invalid int value: 'abc'"),
        ("--fit", "argument --fit: expected one argument"),
        ("--fit 24 --memory", "argument --memory: not allowed with argument --fit"),
        ("--fit 24 --card 24", "recipe demo has no card tables"),
        ("--fit 24 model.path=nowhere", "expected a diffusers pipeline folder"),
    ],
)
def test_mistakes(words: str, sentence: str, capsys: pytest.CaptureFixture) -> None:
    try:
        assert cli.main(["check", "demo", "--quiet", *words.split()]) == 2
    except SystemExit as stopped:  # by argparse
        assert stopped.code == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]


def test_a_model_that_cannot_be_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlowFamily, "wraps_library", lambda *_: False)
    with pytest.raises(UserError, match="cannot estimate the memory of model"):
        fit(build.recipe("demo"), 24)


def test_a_bundled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks: dict[int, int] = {}

    def estimate(recipe: Recipe, images: None) -> Memory:
        found = estimate_memory(recipe)
        peaks[recipe.sampler.batch] = found.peak
        return found

    estimate_memory = fitting.estimate
    monkeypatch.setattr(fitting, "estimate", estimate)
    fitted = fit(build.recipe("demo", ["data.groups=64"]), 1)
    size = fitted.settings["sampler.batch"]
    above = min(peak for batch, peak in peaks.items() if batch > size)
    assert peaks[size] == fitted.memory.peak < usable(1) <= above
    assert 1 < size < 768 and len(peaks) <= 6

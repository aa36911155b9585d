"""Guidance is one function: sampling, replay and the memory estimate all call it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import gesso
from gesso import build
from gesso.models.flow.base import PromptCache
from gesso.models.flow.guidance import guided, rows_per_sample
from gesso.types import Prompt, Size
from tests.conftest import PROMPTS
from tests.rollouts import parts_of, rollout_of
from tests.typed import drawing

SCALE = 3.0


def test_the_two_branches_are_combined_in_one_file() -> None:
    package = Path(gesso.__file__).parent
    callers = {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if re.search(r"\w\.guide\(", file.read_text(encoding="utf-8"))  # not super().guide
    }
    assert callers == {"models/flow/guidance.py"}


def test_every_way_to_run_the_branches_gives_the_same_velocity(recipe_data: dict) -> None:
    """u + scale·(c − u), from one pass, from two, and from a stored negative branch."""
    model = drawing(build.model(build.recipe_from(recipe_data)))
    prompts = [Prompt(text, "a blue sign") for text in PROMPTS]
    cond, negative = PromptCache(model).conditions(prompts, Size(32, 96), SCALE)
    assert negative is not None
    shape = (len(prompts), *model.latent_shape(32, 96))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.9, 0.5, 0.2])
    with torch.no_grad():
        u, c = model.velocity(x, sigma, negative), model.velocity(x, sigma, cond)
        alone = guided(model, x, sigma, cond, None, SCALE)
        both = guided(model, x, sigma, cond, negative, SCALE)
        apart = guided(model, x, sigma, cond, negative, SCALE, gradient="conditional")
        stored = guided(model, x, sigma, cond, None, SCALE, negative_velocity=apart.negative)
    expected = u + SCALE * (c - u)
    assert (expected - c).abs().max() > 1e-3
    assert torch.equal(alone.velocity, c) and alone.negative is None
    torch.testing.assert_close(both.velocity, expected, rtol=1e-4, atol=1e-4)
    assert both.negative is None
    torch.testing.assert_close(apart.velocity, expected, rtol=1e-5, atol=1e-5)
    assert apart.negative is not None and torch.equal(apart.negative, u)
    assert torch.equal(stored.velocity, apart.velocity)
    assert [rows_per_sample(n, "both") for n in (None, negative)] == [1, 2]
    assert rows_per_sample(negative, "conditional") == 1


@pytest.mark.parametrize("gradient", ["both", "conditional"])
def test_replay_is_guided_as_sampling_was(
    recipe_data: dict, gradient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches of the same size, to the bit; a stored negative branch is not run again."""
    recipe_data["algorithm"] |= {"guidance": SCALE, "guidance_gradient": gradient}
    recipe_data["learner"] = {"micro_batch": 6}
    recipe = build.recipe_from(recipe_data)
    model, algorithm, _ = parts_of(recipe)
    rollout = rollout_of(model, algorithm, batch=6)
    rows: list[int] = []
    velocity = model.velocity

    def watched(x: torch.Tensor, *args: object) -> torch.Tensor:
        rows.append(len(x))
        return velocity(x, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "velocity", watched)
    prepared = algorithm.prepare(model, rollout, recipe.learner)
    terms = algorithm.terms(rollout, prepared)
    with torch.no_grad():
        stats = [
            algorithm.loss(model, terms.rows(index)).stats
            for index in terms.micro_batches(recipe.learner)
        ]
    assert torch.cat([part["abs_dlogp"] for part in stats]).max() < 1e-4
    assert set(rows) == ({12} if gradient == "both" else {6}) and len(rows) == len(stats)

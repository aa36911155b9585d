"""DRaFT, ReFL and LeapAlign through the real model, decoder and learner, against a plain
computation, and what they refuse."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gesso import build
from gesso.algorithms.base import Prepared
from gesso.algorithms.reward_gradient import PathTerms, RewardGradient
from gesso.config import Recipe
from gesso.rewards.differentiable import RewardSum, WeightedValues
from gesso.run import train
from gesso.track.progress import SILENT
from gesso.types import Prompt, Sample, Score, UserError
from tests.rollouts import rollout_of
from tests.typed import drawing, sure

ALGORITHMS: dict[str, dict[str, Any]] = {
    "draft": {"name": "draft", "group": 3, "steps": 4, "k": 3},
    "refl": {"name": "refl", "group": 3, "steps": 4, "low": 1},
    "leap-align": {"name": "leap-align", "group": 3, "steps": 4},
}


class Case:
    def __init__(self, recipe_data: dict, algorithm: dict, micro_batch: int = 4) -> None:
        recipe_data |= {"algorithm": algorithm, "learner": {"micro_batch": micro_batch}}
        recipe_data["reward"] = [{"name": "sign-colour", "weight": 2.0}]
        recipe = build.recipe_from(recipe_data)
        self.model = drawing(build.model(recipe))
        built, self.learner = build.learner(recipe, build.algorithm(recipe), self.model, SILENT)
        assert isinstance(built, RewardGradient)
        self.algorithm = built
        self.rollout = rollout_of(self.model, built)
        prepared = Prepared(built.advantage(self.rollout))
        self.terms = sure(PathTerms, built.terms(self.rollout, prepared))

    def gradient(self) -> dict[str, Tensor]:
        self.learner.schedule = self.learner.schedule.model_copy(update={"max_norm": 1e9})
        self.learner._accumulate(self.terms, defaultdict(list))
        return {n: p.grad.clone() for n, p in self.learner.policy.trainable.items()}

    def velocity(self, x: Tensor, sigma: Tensor, i: int) -> Tensor:
        cond = self.terms.context.cond.rows(self.terms.row[i : i + 1])
        return self.model.velocity(x, sigma.view(1), cond)

    def reward(self, latents: Tensor, i: int) -> Tensor:
        """Written plainly: decode, and the soft share of the target among the other colours."""
        vae = self.model.pipe.vae
        z = latents / vae.config.scaling_factor + vae.config.shift_factor
        image = (vae.decode(z, return_dict=False)[0] / 2 + 0.5).clamp(0, 1)
        assert self.algorithm._reward is not None
        return self.algorithm._reward(image, [self.rollout.samples[i].prompt])[0]


def draft(case: Case, i: int) -> Tensor:
    x, sigmas = case.rollout.flow_trace.latents[i : i + 1, 0], case.terms.context.sigmas
    for step in (1, 2, 3):
        x = x + case.velocity(x, sigmas[step], i) * (sigmas[step + 1] - sigmas[step])
    return -case.reward(x, i)


def refl(case: Case, i: int) -> Tensor:
    step = int(case.terms.steps[i, 0])
    x, sigma = case.rollout.flow_trace.latents[i : i + 1, step - 1], case.terms.context.sigmas[step]
    return -case.reward(x - sigma * case.velocity(x, sigma, i), i)


def leap_align(case: Case, i: int) -> Tensor:
    trace, sigmas = case.rollout.flow_trace, case.terms.context.sigmas
    k, j = case.terms.steps[i].tolist()
    x_k, x_j, x_0 = trace.latents[i : i + 1, k], trace.latents[i : i + 1, j], trace.clean[i : i + 1]
    leap = x_k + (sigmas[j] - sigmas[k]) * case.velocity(x_k, sigmas[k], i)
    x = leap + (x_j - leap).detach()
    v = case.velocity(0.3 * x + 0.7 * x.detach(), sigmas[j], i)
    clean = x - sigmas[j] * v
    far = (leap - x_j).abs().mean().clamp(min=0.1) + (clean - x_0).abs().mean().clamp(min=0.1)
    return -case.reward(clean + (x_0 - clean).detach(), i) / far.detach()


@pytest.mark.parametrize("plain", [draft, refl, leap_align])
def test_the_gradient_is_the_plain_one(recipe_data: dict, plain: Callable) -> None:
    """Of six samples in two micro-batches."""
    case = Case(recipe_data, ALGORITHMS[plain.__name__.replace("_", "-")])
    got = case.gradient()
    loss = sum(plain(case, i) for i in range(6)) / 6
    expected = torch.autograd.grad(loss, list(case.learner.policy.trainable.values()))
    scale = max(float(g.abs().max()) for g in expected)
    assert scale > 0
    for name, g in zip(got, expected, strict=True):
        torch.testing.assert_close(got[name], g, atol=1e-4 * scale, rtol=1e-3)


def test_recorded_states_are_those_of_the_sampled_path(recipe_data: dict) -> None:
    """The path of DRaFT over all steps ends where the sampler ended."""
    case = Case(recipe_data, {"name": "draft", "group": 3, "steps": 3, "k": 3})

    def velocity(x: Tensor, sigma: Tensor) -> Tensor:
        return case.model.velocity(x, sigma, case.terms.context.cond.rows(case.terms.row))

    with torch.no_grad():
        clean, _ = case.algorithm.path(velocity, case.terms)
    torch.testing.assert_close(clean, case.rollout.flow_trace.clean)


class Brightness:
    """A user's reward."""

    differentiable = True

    def unfit(self, prompt: Prompt) -> str | None:
        return None if "KITE" in prompt.text else "not a kite"

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [Score(float(sample.pixels.mean() / 255)) for sample in samples]

    def values(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        return images.mean((1, 2, 3))


def test_weights_bounds_and_optional_rewards() -> None:
    images = torch.tensor([0.2, 0.5, 0.9]).view(3, 1, 1, 1).repeat(1, 3, 2, 2).requires_grad_()
    prompts = [Prompt("a KITE"), Prompt("an OAK"), Prompt("a KITE")]
    bounded = WeightedValues("one", 2.0, Brightness(), bounds=(0.0, 0.8))
    optional = WeightedValues("other", -1.0, Brightness(), optional=True)
    values = RewardSum([bounded, optional])(images, prompts)
    assert values.tolist() == pytest.approx([0.2, 1.0, 0.7])
    values.sum().backward()
    assert images.grad is not None
    assert images.grad.sum((1, 2, 3)).tolist() == pytest.approx([1.0, 2.0, -1.0])


USER_CODE = """
class Brightness:
    differentiable = True

    def score(self, samples):
        return [float(sample.pixels.mean() / 255) for sample in samples]

    def values(self, images, prompts):
        return images.mean((1, 2, 3)){end}
"""


def user_recipe(recipe_data: dict, folder: Path, end: str = "") -> Recipe:
    file = folder / "brightness.py"
    file.write_text(USER_CODE.format(end=end))
    recipe_data |= {"algorithm": {"name": "draft", "group": 3, "steps": 3}, "steps": 2}
    recipe_data["reward"] = [{"name": f"{file}:Brightness"}]
    recipe_data["optimizer"] = {"lr": 1e-3}
    return build.recipe_from(recipe_data)


def test_a_run_with_a_user_reward(recipe_data: dict, tmp_path: Path) -> None:
    run = train(user_recipe(recipe_data, tmp_path), folder=tmp_path / "run", quiet=True)
    rows = list(run.rows())
    assert rows[-1]["eval/reward"] > rows[0]["eval/reward"]
    assert rows[1]["update/reward"] == pytest.approx(rows[1]["reward"], abs=2e-3)


@pytest.mark.parametrize(
    "end, got",
    [
        (".detach()", "without gradient"),
        (".sum()", "shape ()"),
        (" / missing", "values(images, prompts) raised NameError"),
    ],
)
def test_values_of_user_code_are_checked(
    recipe_data: dict, tmp_path: Path, end: str, got: str
) -> None:
    with pytest.raises(UserError, match=r'reward ".*Brightness": values') as error:
        train(user_recipe(recipe_data, tmp_path, end), folder=tmp_path / "run", quiet=True)
    assert got in str(error.value)


def refusal(recipe_data: dict, **changes: Any) -> str:
    with pytest.raises(UserError) as error:
        build.recipe_from(recipe_data | changes)
    return str(error.value)


def test_a_reward_without_gradient_is_refused_by_name(recipe_data: dict) -> None:
    draft = {"name": "draft"}
    message = refusal(recipe_data, algorithm=draft, reward=[{"name": "jpeg-compressibility"}])
    assert 'reward "jpeg-compressibility" is not differentiable' in message
    assert "clip-score" in message and "ocr" not in message.split("use one of")[1]
    served = {"name": "sign-colour", "remote": {"urls": ["http://127.0.0.1:1"]}}
    assert 'reward "sign-colour" runs on a server' in refusal(
        recipe_data, algorithm=draft, reward=[served]
    )
    watched = [{"name": "sign-colour"}, {"name": "jpeg-compressibility", "weight": 0.0}]
    build.recipe_from(recipe_data | {"algorithm": draft, "reward": watched})


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"name": "draft", "steps": 4, "k": 5}, "k = 5 exceeds the 4 steps"),
        ({"name": "refl", "steps": 4, "low": 4}, "low = 4 must be less than steps = 4"),
    ],
)
def test_impossible_steps_are_refused(recipe_data: dict, options: dict, sentence: str) -> None:
    reward = [{"name": "sign-colour"}]
    assert sentence in refusal(recipe_data, algorithm=options, reward=reward)

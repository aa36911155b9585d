"""Flash-GRPO and TempFlow-GRPO: one window per prompt, and weights of steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gesso import build
from gesso.algorithms.base import Prepared
from gesso.formulas import flow_steps
from gesso.samplers.base import parts
from gesso.types import SampleSpec, UserError
from tests.rollouts import parts_of, rollout_of

WINDOW = {"size": 1, "low": 0, "high": 4, "per": "prompt"}
SMALL: dict[str, Any] = {"group": 3, "steps": 5, "guidance": 1.0, "updates": 1, "window": WINDOW}
BOTH = ("flash-grpo", "tempflow-grpo")


def built(recipe_data: dict, name: str, **more: Any) -> tuple[Any, Any]:
    options = {"name": name, **SMALL, **more}
    model, algorithm, _ = parts_of(build.recipe_from(recipe_data | {"algorithm": options}))
    return model, algorithm


@pytest.mark.parametrize("name", BOTH)
def test_a_prompt_has_one_step_and_prompts_differ(recipe_data: dict, name: str) -> None:
    model, algorithm = built(recipe_data, name)
    seen = set()
    for seed in range(4):
        steps = rollout_of(model, algorithm, seed).flow_trace.steps.view(2, 3)
        assert steps.equal(steps[:, :1].expand_as(steps)) and int(steps.max()) < 4
        seen.add(tuple(steps[:, 0].tolist()))
    assert any(one != other for one, other in seen) and len(seen) > 2


@pytest.mark.parametrize("name", BOTH)
def test_a_sample_does_not_depend_on_the_batch(recipe_data: dict, name: str) -> None:
    model, algorithm = built(recipe_data, name)
    one, other = (rollout_of(model, algorithm, 3, batch=batch) for batch in (2, 6))
    assert one.flow_trace.steps.equal(other.flow_trace.steps)
    torch.testing.assert_close(one.flow_trace.clean, other.flow_trace.clean, rtol=0, atol=1e-5)
    torch.testing.assert_close(one.logp, other.logp, rtol=0, atol=1e-5)


def test_batches_do_not_mix_prompts_with_windows() -> None:
    spec = SampleSpec(5, 8, 8, stochastic=range(1), trained=range(1))
    row = [0, 0, 0, 1, 1, 2]
    assert parts(row, 4, spec) == [range(0, 4), range(4, 6)]
    each = SampleSpec(5, 8, 8, stochastic=range(1), trained=range(1), starts=range(4))
    assert parts(row, 4, each) == [range(0, 3), range(3, 5), range(5, 6)]
    assert parts(row, 2, each) == [range(0, 2), range(2, 3), range(3, 5), range(5, 6)]


def test_tempflow_branches_at_its_step(recipe_data: dict) -> None:
    """Samples of a group share everything before."""
    model, algorithm = built(recipe_data, "tempflow-grpo")
    latents = rollout_of(model, algorithm, 3).flow_trace.latents.view(2, 3, 2, -1)
    shared, after = latents[:, :, 0], latents[:, :, 1]
    torch.testing.assert_close(shared, shared[:, :1].expand_as(shared), rtol=0, atol=1e-6)
    assert (after[:, 0] - after[:, 1]).abs().max() > 0.01
    assert not shared[0, 0].equal(shared[1, 0])


@pytest.mark.parametrize("name", BOTH)
def test_the_loss_is_weighted_by_step(recipe_data: dict, name: str) -> None:
    model, algorithm = built(recipe_data, name, beta=0.0)
    rollout = rollout_of(model, algorithm, 3)
    terms = algorithm.terms(rollout, Prepared(algorithm.advantage(rollout)))
    with torch.no_grad():
        loss = algorithm.loss(model, terms).loss
    sigmas = rollout.flow_trace.context.sigmas
    s, std = flow_steps.scales(algorithm.rule, sigmas, range(4), algorithm.noise)
    weights = std
    if name == "flash-grpo":
        q = (sigmas[:4] - sigmas[1:5]).sqrt()
        weights = 1 / (q / s + s * q * (1 - sigmas[:4]) / (2 * sigmas[:4]))
    own = (weights / weights.mean())[rollout.flow_trace.steps[:, 0]]
    torch.testing.assert_close(loss, -terms.advantage * own, rtol=1e-4, atol=1e-5)
    assert own.std() > 0


def test_a_window_per_prompt_does_not_move(recipe_data: dict) -> None:
    with pytest.raises(UserError, match="every moves the window of a whole batch"):
        built(recipe_data, "flash-grpo", window=WINDOW | {"every": 3})

"""Gradients taken while sampling: the same update without a pass of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gesso import build
from gesso.types import Rollout
from tests import pipelines
from tests.models.test_folded import Counted, stirred
from tests.models.test_folded import gradient as gradient_of
from tests.rollouts import parts_of, rollout_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipelines.build("sd35", tmp_path_factory.mktemp("one-pass") / "sd35")


@pytest.fixture
def data(recipe_data: dict, folder: Path) -> dict:
    recipe_data["model"] |= {
        "path": str(folder), "text_length": 16, "lora": {"rank": 4, "alpha": 8}, "fold": True,
    }  # fmt: skip
    recipe_data["algorithm"] |= {
        "guidance": 4.5, "steps": 3, "updates": 1, "beta": 0.0, "one_pass": True,
    }  # fmt: skip
    recipe_data["learner"] = {"micro_batch": 6}
    return recipe_data


def compared(data: dict, batch: int = 4) -> torch.Tensor:
    """The gradient, the same in one pass as in two; so are pictures and log-probs."""
    found: list[tuple[Rollout, torch.Tensor]] = []
    for one in (True, False):
        data["algorithm"]["one_pass"] = one
        model, algorithm, learner = parts_of(build.recipe_from(data))
        stirred(model)
        rollout = rollout_of(model, algorithm, batch=batch)
        counted = Counted(model)
        found.append((rollout, gradient_of(learner, rollout)))
        assert bool(counted.rows) != one
        assert (rollout.paths.slopes is not None) == one
    (one_rollout, slope), (rollout, plain) = found
    assert torch.equal(one_rollout.paths.clean, rollout.paths.clean)
    assert torch.equal(one_rollout.logp, rollout.logp)
    assert plain.norm() > 1e-4
    print(float((slope - plain).norm() / plain.norm()))
    assert (slope - plain).norm() < 1e-5 * plain.norm()
    return plain


@pytest.mark.parametrize("gradient", ["both", "conditional"])
def test_an_update_is_that_of_two_passes(data: dict, gradient: str) -> None:
    data["algorithm"]["guidance_gradient"] = gradient
    compared(data)


@pytest.mark.parametrize("gradient", ["both", pytest.param("conditional", marks=pytest.mark.slow)])
def test_compiled_one_graph_serves_all_passes(data: dict, gradient: str) -> None:
    """Three kinds of block, three graphs: of steps with gradient and without, full batches or
    not, and evaluations."""
    from gesso.models.flow.compiled import compile_blocks

    data["algorithm"]["guidance_gradient"] = gradient
    data["sampler"] = {"batch": 4}
    expected = compared(data)
    data["algorithm"]["one_pass"] = True
    model, algorithm, learner = parts_of(build.recipe_from(data))
    stirred(model)
    torch._dynamo.reset()
    compile_blocks(model.transformer, model.blocks, backend="aot_eager")
    model.compiled, model.sizes = True, (8,)
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    for _ in range(2):
        rollout = rollout_of(model, algorithm)
        print(counters["unique_graphs"])
        found = gradient_of(learner, rollout)
        print((found - expected).norm() / expected.norm())

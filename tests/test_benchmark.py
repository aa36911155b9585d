"""The benchmark's two sides compute the same thing; how long they take is not tested."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gesso import build
from gesso.run import Job, assemble
from gesso.types import UserError


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    path = Path(__file__).parent.parent / "benchmarks" / "demo_iteration.py"
    spec = importlib.util.spec_from_file_location("demo_iteration", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo_iteration"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["demo_iteration"]


@pytest.fixture
def job(request: pytest.FixtureRequest, recipe_data: dict[str, Any]) -> Iterator[Job]:
    recipe_data["reward"] = [{"name": "ocr", "detect": False}]
    recipe_data["algorithm"]["window"] = {"size": 2, "low": 1, "high": 3}
    recipe_data["model"]["lora"] = getattr(request, "param", None)  # pytest's way: absent if unset
    job = assemble(build.recipe_from(recipe_data))
    yield job
    job.close()


@pytest.mark.parametrize(
    "job", [None, {"rank": 4, "alpha": 8}], indirect=True, ids=["full", "lora"]
)
def test_both_sides_compute_the_same(benchmark: ModuleType, job: Job) -> None:
    ours = benchmark.Gesso(job)
    plain = benchmark.Plain(job, ours.start)
    proof = benchmark.prove(ours, plain)
    assert benchmark.agrees(proof), proof

    plain.start = {name: tensor + 0.05 for name, tensor in ours.start.items()}
    proof = benchmark.prove(ours, plain)
    wrong = {name for name, (difference, limit) in proof.items() if difference > limit}
    assert {"latents at the end", "gradient, relative"} <= wrong
    assert "log-probs" not in wrong  # at sampling they hang on the noise alone


def test_a_recipe_the_plain_side_cannot_do_is_refused(benchmark: ModuleType, job: Job) -> None:
    guided = job.algorithm.model_copy(update={"guidance": 4.5})  # type: ignore[attr-defined]
    data = job.recipe.model_dump() | {"algorithm": guided.model_dump()}
    other = build.recipe_from(data)
    with pytest.raises(UserError, match="guidance"):
        benchmark.Plain(Job(**(vars(job) | {"recipe": other})), job.learner.weights())

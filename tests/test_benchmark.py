"""The benchmarks' two sides compute the same thing; how long they take is not tested."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from gesso import build
from gesso.run import Job, assemble
from gesso.types import UserError


def script(name: str) -> Iterator[ModuleType]:
    path = Path(__file__).parent.parent / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    yield from script("demo_iteration")


@pytest.fixture(scope="module")
def against_trl() -> Iterator[ModuleType]:
    yield from script("trl_iteration")


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


SMALL = ("data.groups=2", "algorithm.group=2", "algorithm.max_tokens=6", "sampler.batch=4")


@pytest.fixture
def replies(against_trl: ModuleType) -> Iterator[Job]:
    job = assemble(against_trl.settings(SMALL, beta=0.0))
    yield job
    job.close()


def test_our_side_runs_without_trl(against_trl: ModuleType, replies: Job) -> None:
    ours = against_trl.Gesso(replies)
    times = {case: ours.iteration(step, case) for step, case in enumerate(against_trl.CASES)}
    assert times["equal"]["tokens"] == 6  # nobody may end before the limit
    for found in times.values():
        *parts, total = (found[phase] for phase in against_trl.PHASES)
        assert sum(parts) == pytest.approx(total) and found["log-probs"] == 0
    ours.prepare("ragged")
    weights = replies.learner.weights()
    assert all(torch.equal(weights[name], start) for name, start in ours.start.items())
    assert ours.model.suppressed.tolist() == ours.written.tolist()


def test_the_report_compares_rounds(
    against_trl: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [*against_trl.PHASES, *against_trl.FURTHER]
    rounds = {"gesso": (1.0, 2.0, 4.0), "trl": (3.0, 4.0, 16.0)}
    times = {
        f"{name} {case}": [dict.fromkeys(keys, t) for t in taken]
        for name, taken in rounds.items()
        for case in against_trl.CASES
    }
    against_trl.report(times)
    assert "trl / gesso, equal lengths: 3.00 (rounds 2.00 to 4.00" in capsys.readouterr().out


def test_what_trl_does_otherwise_is_refused(against_trl: ModuleType) -> None:
    with pytest.raises(UserError, match="both sides do grpo"):
        against_trl.settings(["algorithm.updates=2"], beta=0.0)


@pytest.mark.slow
def test_trl_has_the_same_loss_and_gradients(against_trl: ModuleType, replies: Job) -> None:
    pytest.importorskip("trl", reason='TRL is not installed; run pip install -e ".[bench]"')
    ours = against_trl.Gesso(replies)
    trl = against_trl.Trl(replies.recipe, replies.cluster.stream.batch(0, 2))
    proof = against_trl.prove(ours, trl)
    assert against_trl.agrees(proof), proof

    ours.start = {name: tensor + 0.01 for name, tensor in ours.start.items()}
    proof = against_trl.prove(ours, trl)
    wrong = {name for name, (difference, limit) in proof.items() if difference > limit}
    assert {"log-probs", "loss, dapo, beta 0", "gradient, dapo, beta 0, worst tensor"} <= wrong

"""Worker processes on a CUDA device, with NCCL and with sharded weights, train as a single process
does, in bfloat16."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.background import Background
from tests.gpu_runs import STEPS, recipe, result, trained, trained_on_two, write_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("workers"),  # with --dist loadgroup: one process makes the runs
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WORKER = ("cluster.workers=1",)
BASE = (*WORKER, "cluster.sharding=base")
ALL = (*WORKER, "cluster.sharding=all")
TWO = ("cluster.workers=2",)
APART = (*WORKER, "cluster.samplers=1")
TWO_RANKS = {*TWO, *APART} - {*WORKER}
COMPILED = ("model.fold=false",)
EAGER = ("model.fold=false", "model.compile=false")
FULL = (*EAGER, "model.lora=none", "optimizer.lr=1e-6")
WHOLE = ("learner.micro_batch=6",)  # a micro-batch has all samples; of two workers, half of them
RUNS = {
    "sd35": {
        "compiled": COMPILED,
        "compiled, base": (*COMPILED, *BASE),
        "eager": (*EAGER, *WHOLE),
        "eager, worker": (*EAGER, *WHOLE, *WORKER),
        "eager, base, offload": (*EAGER, *WHOLE, *BASE, "cluster.offload=true"),
        "eager, two": (*EAGER, *WHOLE, *TWO),
        "eager, two, base": (*EAGER, *WHOLE, *TWO, "cluster.sharding=base"),
        "eager, apart": (*EAGER, *WHOLE, *APART),
        "full": (*FULL, *WHOLE),
        "full, all": (*FULL, *WHOLE, *ALL),
        "full, two, all": (*FULL, *WHOLE, *TWO, "cluster.sharding=all"),
    },
    "flux-dev": {
        "checkpointed": (*EAGER, "model.gradient_checkpointing=true"),
        "checkpointed, base": (*EAGER, *BASE, "model.gradient_checkpointing=true"),
    },
    # A worker decodes part after part, a single process with continuous batching: other bits.
    "qwen2": {
        "lora": (*EAGER, *WORKER),
        "lora, base": (*EAGER, *BASE),
        "lora, apart": (*EAGER, *APART),
        "full": (*FULL, *WORKER),
        "full, all": (*FULL, *ALL),
    },
}


Runs = dict[tuple[str, str], Future[Path]]


def start_runs(background: Background, base: Path) -> Runs:
    prompts = write_prompts(base)
    made: Runs = {}
    for model in RUNS:
        folder = base / model
        folder.mkdir()
        file = recipe(model, folder, prompts)
        for variant, overrides in RUNS[model].items():
            run = folder / variant.replace(", ", "-")
            train = trained_on_two if TWO_RANKS & {*overrides} else trained
            job = partial(train, run, file, folder / f"cache-{run.name}", overrides)
            made[model, variant] = background.start(job)
    return made


@pytest.mark.parametrize(
    ("model", "one", "other"),
    [
        ("sd35", "compiled", "compiled, base"),
        ("sd35", "eager", "eager, worker"),
        ("sd35", "eager", "eager, base, offload"),
        ("flux-dev", "checkpointed", "checkpointed, base"),
        ("qwen2", "lora", "lora, base"),
        ("sd35", "eager, two", "eager, two, base"),
        ("sd35", "eager, worker", "eager, apart"),
        ("qwen2", "lora", "lora, apart"),
    ],
)
def test_every_bit_is_equal(model: str, one: str, other: str, shared_runs: Runs) -> None:
    rows, weights = result(shared_runs[model, one])
    assert len(rows) == STEPS + 1 and weights
    assert (rows, weights) == result(shared_runs[model, other])


@pytest.mark.parametrize("model", ["sd35", "qwen2"])
def test_all_weights_sharded(model: str, shared_runs: Runs) -> None:
    """Forward passes are equal to the bit. In backward FSDP changes the order in which the
    gradients of an activation are added up in bfloat16; tests on a CPU compare each gradient in
    float32."""
    rows, sharded = (result(shared_runs[model, variant])[0] for variant in ("full", "full, all"))
    assert len(rows) == len(sharded) == STEPS + 1
    assert sharded[0] == rows[0], "evaluation of the same weights"
    assert sharded[1]["update/ratio"] == pytest.approx(rows[1]["update/ratio"], rel=1e-6)
    assert sharded[1]["update/grad_norm"] == pytest.approx(rows[1]["update/grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
    ("one", "two"), [("eager, worker", "eager, two"), ("full, all", "full, two, all")]
)
def test_two_workers(one: str, two: str, shared_runs: Runs) -> None:
    """Samples are equal to the bit. Gradients are those of other micro-batches, up to rounding."""
    rows, found = (result(shared_runs["sd35", variant])[0] for variant in (one, two))
    assert len(rows) == len(found) == STEPS + 1
    assert found[0] == rows[0], "evaluation of the same weights"
    assert found[1]["reward"] == rows[1]["reward"]
    assert found[1]["update/ratio"] == pytest.approx(rows[1]["update/ratio"], rel=1e-6)
    assert found[1]["update/grad_norm"] == pytest.approx(rows[1]["update/grad_norm"], rel=1e-2)

"""Worker processes on a CUDA device, with NCCL and with sharded weights, train as a single process
does, in bfloat16."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.gpu_runs import (
    STEPS,
    at_once,
    recipe,
    result,
    trained,
    trained_on_two,
    write_prompts,
)

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
RUNS = {
    "sd35": {
        "compiled": COMPILED,
        "compiled, base": (*COMPILED, *BASE),
        "eager": EAGER,
        "eager, worker": (*EAGER, *WORKER),
        "eager, base, offload": (*EAGER, *BASE, "cluster.offload=true"),
        "eager, two": (*EAGER, *TWO),
        "eager, two, base": (*EAGER, *TWO, "cluster.sharding=base"),
        "eager, apart": (*EAGER, *APART),
        "full": FULL,
        "full, all": (*FULL, *ALL),
        "full, two, all": (*FULL, *TWO, "cluster.sharding=all"),
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    base = tmp_path_factory.mktemp("runs")
    prompts = write_prompts(base)
    made: dict[tuple[str, str], Path] = {}
    jobs = []
    for model in RUNS:
        folder = base / model
        folder.mkdir()
        file = recipe(model, folder, prompts)
        for variant, overrides in RUNS[model].items():
            made[model, variant] = run = folder / variant.replace(", ", "-")
            train = trained_on_two if TWO_RANKS & {*overrides} else trained
            jobs.append(partial(train, run, file, folder / f"cache-{run.name}", overrides))
    at_once(jobs)
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
def test_every_bit_is_equal(
    model: str, one: str, other: str, runs: dict[tuple[str, str], Path]
) -> None:
    rows, weights = result(runs[model, one])
    assert len(rows) == STEPS + 1 and weights
    assert (rows, weights) == result(runs[model, other])


@pytest.mark.parametrize("model", ["sd35", "qwen2"])
def test_all_weights_sharded(model: str, runs: dict[tuple[str, str], Path]) -> None:
    """Forward passes are equal to the bit. In backward FSDP changes the order in which the
    gradients of an activation are added up in bfloat16; tests on a CPU compare each gradient in
    float32."""
    rows, sharded = (result(runs[model, variant])[0] for variant in ("full", "full, all"))
    assert len(rows) == len(sharded) == STEPS + 1
    assert sharded[0] == rows[0], "evaluation of the same weights"
    assert sharded[1]["update/ratio"] == pytest.approx(rows[1]["update/ratio"], rel=1e-6)
    assert sharded[1]["update/grad_norm"] == pytest.approx(rows[1]["update/grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
    ("one", "two"), [("eager, worker", "eager, two"), ("full, all", "full, two, all")]
)
def test_two_workers(one: str, two: str, runs: dict[tuple[str, str], Path]) -> None:
    """Samples are equal to the bit. Gradients are those of other micro-batches, up to rounding."""
    rows, found = (result(runs["sd35", variant])[0] for variant in (one, two))
    assert len(rows) == len(found) == STEPS + 1
    assert found[0] == rows[0], "evaluation of the same weights"
    assert found[1]["reward"] == rows[1]["reward"]
    assert found[1]["update/ratio"] == pytest.approx(rows[1]["update/ratio"], rel=1e-6)
    assert found[1]["update/grad_norm"] == pytest.approx(rows[1]["update/grad_norm"], rel=1e-2)

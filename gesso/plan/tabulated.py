"""Rates of a GPU that we do not have: counted work, divided by data-sheet rates and by the shares
of them that Gesso reaches on one H200.

SD3.5-M and Qwen2.5-VL-3B were measured (`benchmarks/results/flow.md`, `token.md`); other models and
GPUs are assumed to reach the same shares.
"""

from __future__ import annotations

from typing import Any

from gesso.config import Recipe
from gesso.plan.gpus import Gpu
from gesso.plan.rates import Line, Rates, latency
from gesso.plan.work import FlowWork, TokenWork, Work
from gesso.types import UserError

SAMPLE, UPDATE, DECODE, ENCODE = 0.47, 0.42, 0.34, 0.4  # of the data sheet's TFLOP/s
READ = 0.54  # of the memory bandwidth, to read the weights for a token
LAUNCH = 3e-6  # seconds per operator: lower bound, since the host launches kernels one by one
DRIVER = 1e9  # bytes per second through the driver: an assumption
HOST = 2e10  # bytes per second from a GPU to host memory
ADAM = 28  # bytes read and written per trained value and optimizer step


def rates(work: Work, gpu: Gpu, recipe: Recipe, workers: int, score: float = 0.0) -> Rates:
    shards = _shards(recipe, workers)
    link = gpu.link(workers)
    gather = work.sharded * (shards - 1) / shards / gpu.link(shards)
    if recipe.cluster.offload:
        gather = max(gather, work.sharded / HOST)
    whole = recipe.cluster.sharding != "all"
    gradients = work.trained * 4 * (1.0 if whole else 1 / shards)
    common: dict[str, Any] = {
        "eval_cost": work.eval_cost,
        "optimizer": ADAM * work.trained / (1 if whole else shards) / (gpu.bandwidth * 1e12),
        "reduce": 2 * gradients * (workers - 1) / workers / link + 2 * latency(workers),
        "share": work.trace / link,
        "collective": latency(workers),
        "send": 4 * work.trained / gpu.link(workers + recipe.cluster.samplers),
        "save": 3 * gradients / HOST,
        "driver": work.image / DRIVER,
        "score": score,
    }
    peak = 1e12 * (gpu.fp32 if work.dtype == "float32" else gpu.bf16)
    update = Line(
        work.update.flops / (UPDATE * peak),
        floor=max(work.update.operators * LAUNCH, 2 * gather),
    )
    if isinstance(work, FlowWork):
        return Rates(
            **common,
            sample=Line(
                work.steps * work.denoise.flops / (SAMPLE * peak),
                floor=work.steps * max(work.denoise.operators * LAUNCH, gather),
            ),
            decode=Line(work.decode.flops / (DECODE * peak), floor=work.decode.operators * LAUNCH),
            encode=work.encode / (ENCODE * peak),
            update=update,
        )
    assert isinstance(work, TokenWork)
    prefill = (work.prompt * work.token + work.see) / (SAMPLE * peak) / work.group
    token = work.token / peak + work.cache * (work.prompt + work.response / 2) / (
        gpu.bandwidth * 1e12
    )
    forward = work.token * (work.response + work.prompt / work.group) / (SAMPLE * peak)
    return Rates(
        **common,
        sample=Line(
            prefill + work.response * token,
            work.response * work.weights / (READ * gpu.bandwidth * 1e12),
        ),
        gather=gather,
        prepare=Line(work.forwards * forward),
        update=update,
    )


def _shards(recipe: Recipe, workers: int) -> int:
    if recipe.cluster.sharding is None:
        return 1
    within = recipe.cluster.shard_within or workers
    if workers % within:
        raise UserError(f"cluster.shard_within = {within} must divide the {workers} workers")
    return within

"""Which worker runs where, decided before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from gesso.algorithms.base import Algorithm
from gesso.cluster.launched import VISIBLE, Launch
from gesso.config import Recipe
from gesso.samplers.base import parts
from gesso.types import UserError

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Placement:
    workers: int
    gpus: tuple[str, ...]  # of each worker, as in CUDA_VISIBLE_DEVICES; empty: all on the CPU
    threads: int  # of each worker: OMP_NUM_THREADS, or its share of the cores
    parts: int  # into which the samples of a step are cut
    sharded: int = 1  # workers that divide the weights
    launch: Launch | None = None  # workers were started by torchrun
    parallel: int = 1  # workers that run one engine

    def environment(self, rank: int) -> Mapping[str, str]:
        return {THREADS: str(self.threads)} | ({VISIBLE: self.gpus[rank]} if self.gpus else {})

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        where = f"GPU {', '.join(self.gpus)}" if self.gpus else f"CPU, {threads} each"
        number = "1 worker process" if self.workers == 1 else f"{self.workers} worker processes"
        weights = f"; {self.sharded} of them divide the weights" if self.sharded > 1 else ""
        engine = f"; every {self.parallel} of them run one engine" if self.parallel > 1 else ""
        parts = f"the samples of a step are cut into {self.parts} parts"
        return f"{number} ({where}){weights}{engine}; {parts}"


def place(recipe: Recipe, algorithm: Algorithm) -> Placement | None:
    """None without worker processes."""
    wanted, launch = recipe.cluster.workers, Launch.find()
    if launch is not None and wanted not in ("auto", launch.count):
        raise UserError(
            f"cluster.workers = {wanted or 'none'}, but torchrun started {launch.count} processes; "
            "leave out cluster.workers"
        )
    if wanted is None:
        return None
    gpus = _gpus(recipe)
    if launch is not None:
        gpus = launch.gpus(gpus)
    if wanted == "auto":
        wanted = launch.count if launch is not None else len(gpus) or 1
    if gpus and wanted > len(gpus):
        raise UserError(
            f"cluster.workers = {wanted}, but only {len(gpus)} GPUs are visible; use at most "
            f'{len(gpus)}, or "auto"'
        )
    _check(recipe, algorithm, wanted)
    count = len(_parts(recipe, algorithm, recipe.sampler.batch))
    parallel = recipe.sampler.vllm.tensor_parallel
    if count * parallel < wanted:
        raise UserError(
            f"cluster.workers = {wanted}, but the samples of a step in batches of sampler.batch = "
            f"{recipe.sampler.batch} are work for only {count * parallel}; use at most "
            f"{count * parallel} workers{_remedy(recipe, algorithm, wanted)}"
        )
    sharded = 1 if recipe.cluster.sharding is None else recipe.cluster.shard_within or wanted
    return Placement(wanted, gpus[:wanted], _threads(wanted), count, sharded, launch, parallel)


def place_to_sample(recipe: Recipe) -> Placement:
    """The workers of a run, or as many as there are GPUs, to sample from it."""
    gpus, wanted = _gpus(recipe), recipe.cluster.workers
    count = len(gpus) or 1 if wanted in (None, "auto") else int(wanted)
    count = min(count, len(gpus) or count)
    within = recipe.cluster.shard_within
    sharded = within if within and count % within == 0 else count
    return Placement(
        count, gpus[:count], _threads(count), 0, sharded if recipe.cluster.sharding else 1
    )


def _threads(workers: int) -> int:
    given = os.environ.get(THREADS, "")
    return int(given) if given.isdigit() else max(1, (os.cpu_count() or 1) // workers)


def _parts(recipe: Recipe, algorithm: Algorithm, batch: int) -> list[range]:
    """Of a step's samples, as samplers cut them."""
    row = [i for i in range(recipe.data.groups) for _ in range(algorithm.group)]
    return parts(row, batch, algorithm.spec(0, 0, recipe.model))


def _remedy(recipe: Recipe, algorithm: Algorithm, workers: int) -> str:
    """How a new run, which a resumed one is not, can have as many workers."""
    samples = recipe.data.groups * algorithm.group
    parallel = recipe.sampler.vllm.tensor_parallel
    samplers = workers // parallel
    if samples < samplers:
        return f", or start a run with sampler.batch = 1 for up to {samples * parallel}"
    batch = samples // samplers
    while len(_parts(recipe, algorithm, batch)) < samplers:
        batch -= 1
    return f", or start a run with sampler.batch = {batch} or less"


def _gpus(recipe: Recipe) -> tuple[str, ...]:
    """Of the machine, if the recipe's model runs on GPUs."""
    device = recipe.model.device
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(
            f'cluster.workers places one worker per device, but model.device = "{device}"; use '
            f'"auto", "cpu" or "cuda", and select GPUs with {VISIBLE}'
        )
    if device == "cpu":
        return ()
    import torch

    visible = os.environ.get(VISIBLE)
    if not torch.cuda.is_available():
        return ()
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip())
    return tuple(str(i) for i in range(torch.cuda.device_count()))


def _check(recipe: Recipe, algorithm: Algorithm, workers: int) -> None:
    parallel = recipe.sampler.vllm.tensor_parallel
    if workers % parallel:
        raise UserError(
            f"sampler.vllm.tensor_parallel = {parallel} must divide the {workers} workers"
        )
    within = recipe.cluster.shard_within
    if within is not None and workers % within:
        raise UserError(f"cluster.shard_within = {within} must divide the {workers} workers")
    if (workers > 1 or recipe.cluster.sharding) and getattr(algorithm, "one_pass", False):
        raise UserError(
            "algorithm.one_pass keeps a gradient per sample on the device that generated it and "
            f"supports neither cluster.workers = {workers} nor sharding; remove one of them"
        )

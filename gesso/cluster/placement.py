"""Which worker runs where, decided before anything starts."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gesso.algorithms.base import Algorithm
from gesso.cluster import ray_nodes
from gesso.cluster.launched import VISIBLE, Launch
from gesso.config import Recipe
from gesso.samplers.base import parts
from gesso.types import StopRun, UserError

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class OnRay:
    address: str  # as in the recipe
    gpus: bool  # a GPU for each worker; else as many CPUs as it has threads
    nodes: int

    def __str__(self) -> str:
        return f" on a Ray cluster of {self.nodes} {'node' if self.nodes == 1 else 'nodes'}"


@dataclass(frozen=True)
class Placement:
    workers: int  # all processes
    gpus: tuple[str, ...]  # of each worker, as in CUDA_VISIBLE_DEVICES; empty: all on the CPU
    threads: int  # of each worker: OMP_NUM_THREADS, or its share of the cores
    parts: int  # into which the samples of a step are cut
    sharded: int = 1  # workers that divide the weights
    launch: Launch | None = None  # workers were started by torchrun
    parallel: int = 1  # workers that run one engine
    on_ray: OnRay | None = None  # workers are actors of a Ray cluster
    samplers: int = 0  # of the workers, the last ones, which only sample; 0: all do everything

    def environment(self, rank: int) -> Mapping[str, str]:
        return {THREADS: str(self.threads)} | ({VISIBLE: self.gpus[rank]} if self.gpus else {})

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        where = f"GPU {', '.join(self.gpus)}" if self.gpus else f"CPU, {threads} each"
        if self.on_ray is not None and self.on_ray.gpus:
            where = "a GPU each"
        number = "1 worker process" if self.workers == 1 else f"{self.workers} worker processes"
        learners = self.workers - self.samplers
        roles = f", {learners} to train and {self.samplers} to sample" if self.samplers else ""
        weights = f"; {self.sharded} of them divide the weights" if self.sharded > 1 else ""
        sampling = "samplers" if self.samplers else "of them"
        engine = f"; every {self.parallel} {sampling} run one engine" if self.parallel > 1 else ""
        parts = f"the samples of a step are cut into {self.parts} parts"
        return f"{number} ({where}){roles}{self.on_ray or ''}{weights}{engine}; {parts}"


def place(recipe: Recipe, algorithm: Algorithm) -> Placement | None:
    """None without worker processes."""
    wanted, launch = recipe.cluster.workers, Launch.find()
    samplers = recipe.cluster.samplers
    if isinstance(wanted, int):
        wanted += samplers
    if launch is not None and wanted not in ("auto", launch.count):
        raise UserError(
            f"cluster.workers = {recipe.cluster.workers or 'none'}, but torchrun started "
            f"{launch.count} processes; leave out cluster.workers"
        )
    if wanted is None:
        return None
    on_ray: OnRay | None = None
    gpus: tuple[str, ...] = ()
    if recipe.cluster.address is not None:
        on_ray, wanted, threads = _on_ray(recipe, recipe.cluster.address, wanted, launch)
    else:
        gpus = _gpus(recipe)
        if launch is not None:
            gpus = launch.gpus(gpus)
        if wanted == "auto":
            wanted = launch.count if launch is not None else len(gpus) or 1
        if gpus and wanted > len(gpus):
            apart = f" with {samplers} cluster.samplers" if samplers else ""
            raise UserError(
                f"cluster.workers = {wanted - samplers}{apart}, but only {len(gpus)} GPUs are "
                f'visible; use at most {len(gpus) - samplers}, or "auto"'
            )
        threads = _threads(wanted)
    if wanted <= samplers:
        raise UserError(
            f"cluster.samplers = {samplers} leaves none of the {wanted} devices for training; set "
            "cluster.workers to a number, or use fewer samplers"
        )
    _check(recipe, algorithm, wanted - samplers)
    count = len(_parts(recipe, algorithm, recipe.sampler.batch))
    parallel = recipe.sampler.vllm.tensor_parallel
    kind, sampling = ("samplers", samplers) if samplers else ("workers", wanted)
    if count * parallel < sampling:
        raise UserError(
            f"cluster.{kind} = {sampling}, but with sampler.batch = {recipe.sampler.batch} a step "
            f"has work for only {count * parallel}; use at most {count * parallel} "
            f"{kind}{_remedy(recipe, algorithm, sampling)}"
        )
    divided = recipe.cluster.shard_within or wanted - samplers
    sharded = 1 if recipe.cluster.sharding is None else divided
    return Placement(
        wanted, gpus[:wanted], threads, count, sharded, launch, parallel, on_ray, samplers
    )


def place_to_sample(recipe: Recipe) -> Placement:
    """For sampling from a run: its workers, or one per device."""
    wanted = recipe.cluster.workers
    on_ray: OnRay | None = None
    gpus: tuple[str, ...] = ()
    if recipe.cluster.address is not None:
        on_ray, count, threads = _on_ray(recipe, recipe.cluster.address, wanted)
    else:
        gpus = _gpus(recipe)
        count = len(gpus) or 1 if wanted in (None, "auto") else int(wanted)
        count = min(count, len(gpus) or count)
        threads = _threads(count)
    within = recipe.cluster.shard_within
    sharded = within if within and count % within == 0 else count
    sharded = sharded if recipe.cluster.sharding else 1
    return Placement(count, gpus[:count], threads, 0, sharded, on_ray=on_ray)


def place_again(placement: Placement, recipe: Recipe) -> Placement:
    """The same placement on the remaining nodes of a Ray cluster, with the same number of
    threads."""
    if placement.on_ray is None:
        return placement
    nodes = [n for n in ray_nodes.nodes(placement.on_ray.address) if n.reachable()]
    found = _places(nodes, placement.on_ray.gpus, placement.threads)
    within, parallel = recipe.cluster.shard_within or 1, placement.parallel
    samplers, learners = placement.samplers, placement.workers - placement.samplers
    if samplers:  # keep the workers that train: weights may be sharded over them
        samplers = min(samplers, max(parallel, (found - learners) // parallel * parallel))
        needed = f"{within} to train and {parallel} to sample"
    else:
        within = math.lcm(within, parallel)
        needed = f"{within}"
    learners = min(learners, (found - samplers) // within * within)
    if learners <= 0:
        raise StopRun(
            f"the {len(nodes)} remaining nodes of the Ray cluster can run {found} workers, but at "
            f"least {needed} are needed (cluster.shard_within, sampler.vllm.tensor_parallel)"
        )
    sharded = placement.sharded
    if not recipe.cluster.shard_within:
        sharded = min(sharded, learners)
    return replace(
        placement,
        workers=learners + samplers,
        sharded=sharded,
        on_ray=replace(placement.on_ray, nodes=len(nodes)),
        samplers=samplers,
    )


def _places(nodes: Sequence[ray_nodes.Node], gpus: bool, threads: int) -> int:
    return sum(node.gpus if gpus else node.cpus // threads for node in nodes)


def _on_ray(
    recipe: Recipe,
    address: str,
    wanted: int | Literal["auto"] | None,
    launch: Launch | None = None,
) -> tuple[OnRay, int, int]:
    """Also returns the number of workers, and the threads of each."""
    if launch is not None:
        raise UserError(
            "cluster.address starts workers with Ray, but this process was started by torchrun; "
            "use one of them"
        )
    device = _device(recipe)
    nodes = ray_nodes.nodes(address)
    gpus = 0 if device == "cpu" else sum(node.gpus for node in nodes)
    if device == "cuda" and not gpus:
        raise UserError('model.device = "cuda", but the Ray cluster has no GPUs; use "auto"')
    if wanted == "auto":
        wanted = gpus or len(nodes)
    assert wanted is not None
    threads = _given_threads() or ray_nodes.most_threads(nodes, wanted)
    found = _places(nodes, gpus > 0, threads)
    if wanted > found:
        kind = "GPUs" if gpus else f"CPU workers of {threads} threads ({THREADS})"
        samplers = recipe.cluster.samplers
        apart = f" with {samplers} cluster.samplers" if samplers else ""
        raise UserError(
            f"cluster.workers = {wanted - samplers}{apart}, but the Ray cluster has {found} {kind} "
            f'on {len(nodes)} nodes; start more nodes, or use "auto"'
        )
    return OnRay(address, gpus > 0, len(nodes)), wanted, threads


def _threads(workers: int) -> int:
    return _given_threads() or max(1, (os.cpu_count() or 1) // workers)


def _given_threads() -> int:
    """0: not given."""
    given = os.environ.get(THREADS, "")
    return int(given) if given.isdigit() else 0


def _parts(recipe: Recipe, algorithm: Algorithm, batch: int) -> list[range]:
    """The parts into which samplers cut the samples of a step."""
    row = [i for i in range(recipe.data.groups) for _ in range(algorithm.group)]
    return parts(row, batch, algorithm.spec(0, 0, recipe.model))


def _remedy(recipe: Recipe, algorithm: Algorithm, workers: int) -> str:
    """How a new run (not a resumed one) can have this number of workers."""
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
    if _device(recipe) == "cpu":
        return ()
    import torch

    visible = os.environ.get(VISIBLE)
    if not torch.cuda.is_available():
        return ()
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip())
    return tuple(str(i) for i in range(torch.cuda.device_count()))


def _device(recipe: Recipe) -> str:
    device = recipe.model.device
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(
            f'cluster.workers places one worker per device, but model.device = "{device}"; use '
            f'"auto", "cpu" or "cuda", and select GPUs with {VISIBLE}'
        )
    return device


def _check(recipe: Recipe, algorithm: Algorithm, workers: int) -> None:
    """`workers`: those that train."""
    parallel = recipe.sampler.vllm.tensor_parallel
    if not recipe.cluster.samplers and workers % parallel:
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

"""Estimates the device memory of a recipe, without weights and without the device.

The networks are built on torch's meta device, where tensors have shapes but no values. The work of
a run (updating with one micro-batch, sampling one batch) is executed there once, and every tensor
is counted from its allocation until it is freed. Not included: the allocator's rounding, the CUDA
context (a few hundred MB), and rewards, which run in other processes.

Each family defines the work of a run (`memory/flow.py`, `memory/tokens.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gesso import build, families
from gesso.algorithms.base import Algorithm
from gesso.config import AnyModel, Recipe
from gesso.data import prompts
from gesso.data.prompts import ImageSizes, LargestPrompt
from gesso.data.readers import why_not_local
from gesso.memory.meta import MASTER, Load, Role, peak
from gesso.memory.sharded import NOT_SHARDED, Shards
from gesso.track.progress import SILENT, Progress
from gesso.types import UserError, Which
from gesso.weights.folding_rule import estimated_on_gpu, estimated_to_fold
from gesso.weights.layout import Layout
from gesso.worker import undivided

USABLE = 0.9  # of a GPU's memory; the CUDA context and the allocator's gaps take the rest
EXACT_SUM = 16  # bytes per trained value on a CPU, where gradients are summed exactly


@dataclass(frozen=True)
class Memory:
    """Bytes. `lasting` is always allocated; of `passing` only one entry at a time, as gradients are
    freed before the next batch is sampled. `host` is an upper bound for host memory."""

    lasting: dict[str, int]
    passing: dict[str, int]
    host: dict[str, int]
    copy: int  # one copy of the policy's trained weights

    @property
    def peak(self) -> int:
        return sum(self.lasting.values()) + max(self.passing.values(), default=0)


def _on_meta(section: AnyModel, algorithm: Algorithm, folds: bool) -> AnyModel:
    """The meta device has no 4-bit weights; what else depends on them is settled here."""
    one_pass = getattr(algorithm, "one_pass", False)
    settled: dict[str, object] = {"fold": folds and estimated_to_fold(section, one_pass)}
    if section.quantize is not None:
        settled |= {"quantize": None, "compile": False}
    return section.model_copy(update={"device": "meta", **settled})


def usable(card: int) -> float:
    """Bytes that a run may take on a GPU of `card` GB."""
    return USABLE * card * 2**30


class Assumed(NamedTuple):
    """A recipe as it is estimated, and what that assumes about the prompts."""

    recipe: Recipe
    prompts: str = ""  # empty if the memory does not depend on them
    images: ImageSizes | None = None  # of every prompt; None: as few as the model accepts


def assuming(recipe: Recipe, largest: LargestPrompt | None) -> Assumed:
    """The recipe with the largest prompt of its data. Its tokens become the limit on prompts, which
    decides the size of the KV cache; every prompt has its input images."""
    if largest is None:
        return Assumed(recipe)
    paths = " and ".join(dict.fromkeys(s.path for s in (*recipe.data.train, *recipe.data.eval)))
    text = f"{families.of(recipe).assumed_prompts(recipe, largest)}, as in {paths}"
    if largest.tokens is not None:
        section = recipe.model.model_copy(update={"max_prompt": largest.tokens})
        recipe = recipe.model_copy(update={"model": section})
    return Assumed(recipe, text, largest.images)


def with_data(recipe: Recipe, progress: Progress = SILENT) -> Assumed:
    """The same, with the data read if it matters and is on this machine. Prompts that cannot be
    scored count too: rewards are not started."""
    family = families.of(recipe)
    unread = family.assumed_prompts(recipe, None)
    if not unread:
        return Assumed(recipe)
    reasons = (why_not_local(s.path) for s in (*recipe.data.train, *recipe.data.eval))
    if missing := next((reason for reason in reasons if reason), None):
        return Assumed(recipe, f"{unread}: {missing}")
    progress.phase("loading data")
    given = build.given(recipe)
    data = prompts.load(recipe.data, lambda prompt: None, lambda prompt: None, given)
    _, algorithm, model = built_on_meta(recipe)
    return assuming(recipe, family.fit(recipe, algorithm, model, data, progress).largest)


def built_on_meta(
    recipe: Recipe, images: ImageSizes | None = None
) -> tuple[Recipe, Algorithm, Any]:
    """The recipe for the meta device, its algorithm and its model. `images`: of every prompt; None:
    as few as the model accepts."""
    algorithm = build.algorithm(recipe)
    section = _on_meta(recipe.model, algorithm, recipe.cluster.sharding is None)
    bare = recipe.model_copy(update={"model": section})
    model = build.model(bare)
    if not families.of(recipe).wraps_library(model):
        raise UserError(
            f'cannot estimate the memory of model "{recipe.model.name}": expected a diffusers '
            "pipeline derived from PipelineModel, or a model of transformers"
        )
    if images is not None:
        model.blank_images = images
    return bare, algorithm, model


def estimates(recipe: Recipe, images: ImageSizes | None = None) -> dict[Role, Memory]:
    """The memory of each role of a worker."""
    return {role: estimate(recipe, role, images) for role in roles(recipe)}


def roles(recipe: Recipe) -> Sequence[Role]:
    return ("learner", "sampler") if recipe.cluster.samplers else ("worker",)


def estimate(recipe: Recipe, role: Role = "worker", images: ImageSizes | None = None) -> Memory:
    """The memory of a worker in this role."""
    if role == "sampler":
        recipe = undivided(recipe)
    bare, algorithm, model = built_on_meta(recipe, images)
    family = families.of(recipe)
    algorithm, critic = family.add_critic(bare, algorithm, model)
    critic_parameters = critic.trained if critic is not None else {}
    on_gpu = estimated_on_gpu(recipe.model, getattr(algorithm, "one_pass", False))
    shards = _shards(recipe, model, on_gpu)
    load = family.memory_load(recipe, algorithm, model)
    policy = model.policy
    for copy in _copies(recipe, algorithm, role):
        policy.snapshot(copy)
    parameters = [*policy.trainable.values(), *critic_parameters.values()]
    trained = sum(p.numel() for p in parameters) * MASTER - shards.elsewhere(shards.trained)
    copied = policy.size * MASTER - shards.elsewhere(shards.trained)
    networks = dict(load.networks)
    networks[next(iter(networks))] -= shards.elsewhere(shards.weights)
    lasting = {
        **networks,
        "optimizer": 2 * trained,
        "copies of the trained weights": len(policy.copies) * copied,
        "stored samples": load.stored,
    }
    host = dict(load.host)
    if role == "sampler":  # teachers are loaded to train; traces wait in host memory
        lasting |= {"optimizer": 0, "teacher": 0, "stored samples": 0}
        waiting = (recipe.lag + 1) * load.stored // recipe.cluster.samplers
        (host if on_gpu else lasting)["samples for the learners"] = waiting
    allocated = [*load.tensors, *(t for copy in policy.copies.values() for t in copy.values())]
    allocated += parameters
    passing = {}
    if role != "sampler":
        sums = trained  # of the gradients of all micro-batches
        if not on_gpu:
            exact = EXACT_SUM if _several_passes(recipe, load) else 0
            sums += sum(p.numel() for p in parameters if p not in shards) * (exact - MASTER)
        for parameter in parameters:
            if on_gpu or parameter in shards:
                parameter.grad = torch.empty_like(parameter)
                allocated.append(parameter.grad)
        update = peak(allocated, load.update) + shards.gathered_with_gradients
        passing["update with gradients"] = sums + update
    for name, work in load.works_of(role).items():
        passing[name] = peak(allocated, work)
        if family.gathers_to_sample:
            passing[name] += shards.weights
        elif name not in load.without_network:
            passing[name] += shards.gathered
    if shards.offload:
        kept = shards.weights + (3 + len(policy.copies)) * shards.trained
        host["sharded weights"] = kept // shards.ranks
    nonzero = {name: size for name, size in lasting.items() if size}
    return Memory(nonzero, passing, host, policy.size * MASTER)


def _several_passes(recipe: Recipe, load: Load) -> bool:
    """Whether a worker runs a further backward pass while it holds the sum of earlier ones."""
    workers = recipe.cluster.workers
    learners = workers if isinstance(workers, int) else 1
    return load.micro_batches is None or load.micro_batches > learners


def _copies(recipe: Recipe, algorithm: Algorithm, role: Role) -> list[Which]:
    """Copies of the weights in a worker, except the current ones; a sampler holds those it uses."""
    averaged: list[Which] = ["ema"] if recipe.learner.ema else []
    if role != "sampler":
        return [*algorithm.needs, *averaged]
    specs = (algorithm.spec(0, 0, recipe.model), algorithm.greedy_spec())
    used = {spec.weights for spec in specs if spec is not None}
    return [*sorted(used - {"current"}), *averaged]


def _shards(recipe: Recipe, model: Any, on_gpu: bool) -> Shards:
    cluster = recipe.cluster
    if cluster.sharding is None:
        return NOT_SHARDED
    workers = cluster.workers if isinstance(cluster.workers, int) else torch.cuda.device_count()
    layout = Layout.of(cluster, max(1, workers))
    return Shards.of(model.sharding, model.policy.whole(model.sharding), layout, on_gpu)

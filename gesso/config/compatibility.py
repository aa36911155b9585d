"""Checks of a recipe that apply to both families: the device, and the sizes of batches. The checks
of each family are in `families/`."""

from __future__ import annotations

from typing import Protocol

from gesso.config.base import MAX_SAMPLES
from gesso.config.schema import AnyRecipe, Recipe
from gesso.types import UserError


class Batches(Protocol):
    """How an algorithm splits a rollout."""

    @property
    def group(self) -> int: ...

    @property
    def updates(self) -> int: ...

    @property
    def refills(self) -> int: ...

    @property
    def probe(self) -> int | None: ...

    @property
    def whole_groups(self) -> bool: ...


def check_device(recipe: AnyRecipe, where: str) -> None:
    """Rejects torch's meta device, which Gesso uses internally to estimate memory."""
    device = recipe.model.device
    if device.partition(":")[0] == "meta":
        raise UserError(
            f'{where}: model.device = "{device}" cannot hold values; use "auto", "cpu" or "cuda"'
        )


def check_cluster(recipe: Recipe, where: str) -> None:
    """Rejects settings that require workers, and those that sharded weights do not support."""
    cluster, model = recipe.cluster, recipe.model
    parallel = recipe.sampler.vllm.tensor_parallel
    if parallel > 1 and cluster.workers is None:
        raise UserError(
            f"{where}: sampler.vllm.tensor_parallel = {parallel} divides a model over workers and "
            f"requires cluster.workers; set it to a multiple of {parallel}"
        )
    sampling, count = "workers", cluster.workers
    if cluster.samplers:
        sampling, count = "samplers", cluster.samplers
    if isinstance(count, int) and count % parallel:
        raise UserError(
            f"{where}: sampler.vllm.tensor_parallel = {parallel} must divide cluster.{sampling} = "
            f"{count}"
        )
    if cluster.samplers:
        check_samplers(recipe, where)
    if cluster.sharding is None:
        for key in ("shard_within", "offload"):
            if getattr(cluster, key):
                raise UserError(
                    f"{where}: cluster.{key} requires cluster.sharding; set it or remove "
                    f"cluster.{key}"
                )
        return
    sharding = f'{where}: cluster.sharding = "{cluster.sharding}"'
    if cluster.workers is None:
        raise UserError(f'{sharding} requires cluster.workers; set it to a number or "auto"')
    fits, training = ("all", "a full fine-tune") if model.lora is None else ("base", "a LoRA")
    if cluster.sharding != fits:
        raise UserError(f'{sharding} does not fit {training}; use "{fits}"')
    if model.quantize is not None:
        raise UserError(f"{sharding} does not support model.quantize; remove one of them")
    if model.fold:
        raise UserError(
            f"{sharding} does not support model.fold = true, which reads all weights outside of a "
            "pass; remove one of them"
        )


def check_samplers(recipe: Recipe, where: str) -> None:
    """Rejects settings that separate samplers do not support."""
    cluster = recipe.cluster
    samplers = f"{where}: cluster.samplers = {cluster.samplers}"
    if cluster.workers is None:
        raise UserError(
            f"{samplers} requires cluster.workers, the number of workers that train; set it, for "
            "example to 1"
        )
    if recipe.sampler.engine == "data":
        raise UserError(
            f'{samplers} does not support sampler.engine = "data", which samples nothing; remove '
            "one of them"
        )


def check_sizes(recipe: Recipe, algorithm: Batches, where: str) -> None:
    """All updates of a rollout must have the same size, and refills must be on-policy."""
    if algorithm.refills and recipe.lag:
        raise UserError(
            f"{where}: algorithm.refills = {algorithm.refills} samples again with the weights of "
            f"the current step and requires lag = 0, got lag = {recipe.lag}"
        )
    if algorithm.probe and recipe.lag:
        raise UserError(
            f"{where}: algorithm.probe = {algorithm.probe} samples the rest of a group with the "
            f"weights of the current step and requires lag = 0, got lag = {recipe.lag}"
        )
    samples, updates = recipe.data.groups * algorithm.group, algorithm.updates
    if samples > MAX_SAMPLES:
        raise UserError(
            f"{where}: data.groups × algorithm.group = {recipe.data.groups} × {algorithm.group} = "
            f"{samples:,} samples per step; the maximum is {MAX_SAMPLES:,}"
        )
    count, units = samples, f"data.groups × algorithm.group = {recipe.data.groups} × "
    units += f"{algorithm.group} = {samples} samples"
    if algorithm.whole_groups:
        count, units = recipe.data.groups, f"data.groups = {recipe.data.groups} whole groups"
    if count % updates:
        divisors = [n for n in range(1, count + 1) if count % n == 0]
        near = sorted(sorted(divisors, key=lambda n: abs(n - updates))[:2])
        raise UserError(
            f"{where}: {units} cannot be split into {updates} updates; use algorithm.updates = "
            f"{' or '.join(map(str, near))}"
        )

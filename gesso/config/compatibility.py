"""Checks of a recipe that concern no family: its device, and how its batches are cut. Those of a
family are in `families/`."""

from __future__ import annotations

from typing import Protocol

from gesso.config.schema import MAX_SAMPLES, AnyRecipe, Recipe
from gesso.types import UserError


class Batches(Protocol):
    """How an algorithm cuts a rollout."""

    @property
    def group(self) -> int: ...

    @property
    def updates(self) -> int: ...

    @property
    def refills(self) -> int: ...


def check_device(recipe: AnyRecipe, where: str) -> None:
    """Gesso itself puts models on torch's meta device, to estimate their memory."""
    device = recipe.model.device
    if device.partition(":")[0] == "meta":
        raise UserError(
            f'{where}: model.device = "{device}" has shapes and no values; use "auto", "cpu" or '
            '"cuda"'
        )


def check_sizes(recipe: Recipe, algorithm: Batches, where: str) -> None:
    """All updates of a rollout must be equally large, and refills of the step's own weights."""
    if algorithm.refills and recipe.lag:
        raise UserError(f"{where}: refills draw anew for this step's weights; use lag = 0")
    samples, updates = recipe.data.groups * algorithm.group, algorithm.updates
    if samples > MAX_SAMPLES:
        raise UserError(
            f"{where}: data.groups × algorithm.group = {recipe.data.groups} × {algorithm.group} = "
            f"{samples:,} samples a step; at most {MAX_SAMPLES:,} are held in memory"
        )
    if samples % updates:
        divisors = [n for n in range(1, samples + 1) if samples % n == 0]
        near = sorted(sorted(divisors, key=lambda n: abs(n - updates))[:2])
        raise UserError(
            f"{where}: data.groups × algorithm.group = {recipe.data.groups} × {algorithm.group} = "
            f"{samples} samples cannot be split into {updates} updates; use algorithm.updates = "
            f"{' or '.join(map(str, near))}"
        )

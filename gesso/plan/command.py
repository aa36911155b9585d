"""`gesso plan`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gesso import families
from gesso.config import Recipe
from gesso.estimate import Assumed, assuming, with_data
from gesso.plan import gpus, tabulated, work
from gesso.plan.planner import Plan, Planner
from gesso.track.progress import SILENT, Progress
from gesso.types import UserError

MOST = 1024  # workers


@dataclass(frozen=True)
class Wanted:
    gpus: int
    gpu: str | None  # None: workers as measured on this machine
    score: float = 0.0  # seconds per sample and reward worker
    response: int | None = None  # mean tokens
    price: float | None = None  # dollars per GPU and hour; None: the table's


@dataclass(frozen=True)
class Planned:
    plan: Plan
    price: float  # dollars per GPU and hour; 0: unknown


def plan(recipe: Recipe, wanted: Wanted, progress: Progress = SILENT) -> Planned:
    for option, value in (("--score-s", wanted.score), ("--price", wanted.price or 0.0)):
        if not 0 <= value < math.inf:
            raise UserError(f"{option} expects a number of at least 0, got {value:g}")
    if not 1 <= wanted.gpus <= MOST:
        raise UserError(f"--gpus expects 1 to {MOST}, got {wanted.gpus}")
    if wanted.response is not None and families.of(recipe).name == "flow":
        raise UserError("--response-tokens is for language models; remove it")
    if recipe.partial:
        raise UserError(
            "gesso plan does not support partial = true, since the lengths of responses are "
            "unknown; add partial=false"
        )
    if wanted.gpu is None:
        from gesso.plan import measure

        if recipe.cluster.samplers:
            raise UserError(
                "gesso plan --measure does not support cluster.samplers; remove one of them, or "
                "use --gpu"
            )
        measured = measure.measure(recipe, progress)
        assumed = assuming(recipe, measured.largest)
        planner = Planner(
            assumed.recipe,
            measured.rates_of,
            measured.longest,
            progress=progress,
            measured=measured.memory,
            images=assumed.images,
        )
        return Planned(_plan(planner, wanted, assumed), wanted.price or 0.0)
    gpu = gpus.find(wanted.gpu)
    assumed = with_data(recipe, progress)
    progress.phase("counting the work of a step")
    counted = work.count(assumed.recipe, wanted.response, assumed.images)
    planner = Planner(
        assumed.recipe,
        lambda sized, count: tabulated.rates(counted, gpu, sized, count, wanted.score),
        counted.longest,
        gpu,
        progress,
        images=assumed.images,
    )
    price = gpu.price if wanted.price is None else wanted.price
    return Planned(_plan(planner, wanted, assumed), price)


def _plan(planner: Planner, wanted: Wanted, assumed: Assumed) -> Plan:
    """Notes what it assumes about the prompts."""
    plan = planner.plan(wanted.gpus)
    notes = [f"assuming {assumed.prompts}"] if assumed.prompts else []
    return replace(plan, notes=[*plan.notes, *notes])

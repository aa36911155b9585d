"""`gesso check --fit`: the largest batches for a GPU, by memory estimates alone."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gesso import build, families
from gesso.check import size_of
from gesso.config import Recipe
from gesso.estimate import Memory, estimate, usable, with_data
from gesso.track.progress import SILENT, Progress
from gesso.types import UserError
from gesso.weights.folding_rule import estimated_to_fold

GROWTH = 8  # a guess is at most this many times a value that fits
GUESSES = 6  # after which the search bisects


@dataclass(frozen=True)
class Fitted:
    """Settings by their keys, and the estimate with them."""

    settings: Mapping[str, int]
    memory: Memory
    prompts: str  # what the estimate assumes about them

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.settings.items()]


def fit(recipe: Recipe, card: int, progress: Progress = SILENT) -> Fitted:
    """The recipe's largest batches for a GPU of `card` GB. Sizes that are independent are searched
    one after the other, the later ones at their minimum."""
    if card < 1:
        raise UserError(f"--fit expects the memory of a GPU in GB, at least 1, got {card}")
    limit, assumed = usable(card), with_data(recipe, progress)
    sizes = families.of(recipe).batch_sizes(assumed.recipe, build.algorithm(recipe))
    settings = {key: size.values[0] for size in sizes for key in size.keys}
    estimates: dict[tuple[int, ...], Memory] = {}

    def estimated() -> Memory:
        key = tuple(settings.values())
        if key not in estimates:
            progress.phase(f"estimating {', '.join(f'{k}={v}' for k, v in settings.items())}")
            estimates[key] = estimate(
                with_settings(assumed.recipe, settings), images=assumed.images
            )
        return estimates[key]

    def peak(keys: Sequence[str], value: int) -> int:
        settings.update(dict.fromkeys(keys, value))
        return estimated().peak

    if estimated().peak >= limit:
        raise UserError(_too_large(recipe, settings, estimated().peak, card))
    for size in sizes:
        value = largest(size.values, partial(peak, size.keys), limit)
        settings.update(dict.fromkeys(size.keys, value))
    return Fitted(settings, estimated(), assumed.prompts)


def largest(values: Sequence[int], peak: Callable[[int], int], limit: float) -> int:
    """The largest of the ascending values whose peak is below the limit; the first one is. Memory
    grows about linearly, so a few secant steps find it; every result is verified."""
    peaks: dict[int, int] = {}  # by index
    fits, exceeds, index = 0, len(values), 0
    while True:
        peaks[index] = peak(values[index])
        fits, exceeds = (index, exceeds) if peaks[index] < limit else (fits, index)
        if exceeds - fits == 1:
            return values[fits]
        if len(peaks) > GUESSES:
            guess: float = values[(fits + exceeds) // 2]
        else:
            guess = _secant({values[i]: p for i, p in peaks.items()}, values[fits], limit)
        index = min(max(bisect.bisect_right(values, guess) - 1, fits + 1), exceeds - 1)


def _secant(peaks: Mapping[int, int], fits: int, limit: float) -> float:
    """The value at which a line through two known peaks reaches the limit: that of the largest
    value that fits, and the nearest one above it, else below."""
    others = [value for value in peaks if value > fits] or [
        value for value in peaks if value < fits
    ]
    if not others:
        return 2 * fits
    other = min(others, key=lambda value: abs(value - fits))
    slope = (peaks[other] - peaks[fits]) / (other - fits)
    guess = fits + (limit - peaks[fits]) / slope if slope > 0 else math.inf
    return min(guess, GROWTH * fits)


def with_settings(recipe: Recipe, settings: Mapping[str, int]) -> Recipe:
    for key, value in settings.items():
        section, name = key.split(".")
        table = {"sampler": recipe.sampler, "learner": recipe.learner}[section]
        recipe = recipe.model_copy(update={section: table.model_copy(update={name: value})})
    return recipe


def _too_large(recipe: Recipe, settings: Mapping[str, int], peak: int, card: int) -> str:
    model, algorithm = recipe.model, build.algorithm(recipe)
    one_pass = getattr(algorithm, "one_pass", False)  # which needs a folded LoRA
    remedies = {
        "model.gradient_checkpointing=true": not model.gradient_checkpointing,
        "model.lora.rank=16": model.lora is None,
        "model.fold=false": estimated_to_fold(model) and not one_pass,
        "model.quantize=nf4": model.lora and model.quantize is None and not one_pass,
        f"data.groups below {recipe.data.groups}": recipe.data.groups > algorithm.updates,
    }
    given = " ".join(f"{key}={value}" for key, value in settings.items())
    return (
        f"even {given} needs about {size_of(peak)}, but a GPU of {card} GB leaves "
        f"{size_of(usable(card))}; try {', '.join(r for r, helps in remedies.items() if helps)}"
        f"{' or ' if any(remedies.values()) else ''}a larger GPU"
    )

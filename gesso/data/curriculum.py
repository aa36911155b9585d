"""Samples prompts in proportion to how much can still be learned from them.

The spread of a prompt is the standard deviation of its group's rewards when it was last sampled:
without spread there is no advantage, and nothing to learn. Batch i is a pure function of the seed,
of i and of the spreads of the steps up to i − 1 − lag. These are always known when batch i is
sampled, whether or not the run was resumed before.
"""

from __future__ import annotations

import copy
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gesso.config import Model, Recipe
from gesso.data.prompts import Stream, WeightedPrompts, prompt_key
from gesso.data.ratios import RatioStream
from gesso.types import Prompt, seed_of


def stream_of(parts: Sequence[WeightedPrompts], recipe: Recipe) -> Stream:
    """The training prompts of a recipe."""
    section = recipe.data.curriculum
    if isinstance(recipe.model, Model) and recipe.model.match_input:
        return RatioStream(parts, recipe.seed)
    if section is None:
        return Stream(parts, recipe.seed)
    return CurriculumStream(parts, recipe.seed, section.floor, Spreads(recipe.lag))


class Spreads:
    """The last spread of each prompt, by its key."""

    def __init__(self, lag: int = 0) -> None:
        self.lag = lag
        self._known: dict[str, float] = {}
        self._recent: dict[int, dict[str, float]] = {}  # by step; not yet in `_known`

    def add(self, step: int, spreads: Mapping[str, float]) -> None:
        self._recent.setdefault(step, {}).update(spreads)

    def for_batch(self, i: int) -> Mapping[str, float]:
        """The spreads that batch i depends on. Batches are drawn in order; after a resume, up to
        `lag` batches are drawn again."""
        for step in [step for step in sorted(self._recent) if step < i - 2 * self.lag]:
            self._known |= self._recent.pop(step)
        known = dict(self._known)
        for step in sorted(self._recent):
            if step <= i - 1 - self.lag:
                known |= self._recent[step]
        return known

    def state(self) -> dict[str, Any]:
        """A copy: it may be written while the run continues."""
        recent = {str(step): dict(spreads) for step, spreads in self._recent.items()}
        return {"known": dict(self._known), "recent": recent}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._known = dict(state["known"])
        self._recent = {int(step): dict(spreads) for step, spreads in state["recent"].items()}


class CurriculumStream(Stream):
    """Sources alternate as in `Stream`. Within a source a batch has distinct prompts, drawn one
    after the other with probability ∝ (1 − floor) · w·s / Σ w·s + floor · w / Σ w, with w the
    weight of the row and s its spread. The spread of a prompt that has not been seen is the largest
    one of its source."""

    def __init__(
        self, parts: Sequence[WeightedPrompts], seed: int, floor: float, spreads: Spreads
    ) -> None:
        super().__init__(parts, seed)
        self.floor = floor
        self.spreads = spreads
        self._keys = [[prompt_key(prompt) for prompt in part.prompts] for part in parts]
        self._metrics: dict[str, float] = {}

    def batch(self, i: int, size: int) -> list[Prompt]:
        known = self.spreads.for_batch(i)
        sources = [source for source, _ in self._turns(i * size, size)]
        rows = {s: iter(self._draw(s, i, sources.count(s), known)) for s in set(sources)}
        chosen = [(source, next(rows[source])) for source in sources]
        self._metrics = self._described(chosen, known)
        return [self.parts[source].prompts[row] for source, row in chosen]

    def _draw(self, source: int, i: int, count: int, known: Mapping[str, float]) -> list[int]:
        """Rows of a source. Weighted draws without replacement, by the largest of log(u)/p with one
        uniform u for each row (Efraimidis & Spirakis 2006)."""
        shares = draw_shares(
            self._weights[source], [known.get(key) for key in self._keys[source]], self.floor
        )
        rng = random.Random(seed_of(self.seed, "curriculum", i, source))
        ranks = [math.log(1.0 - rng.random()) / share for share in shares]
        order = sorted(range(len(shares)), key=lambda row: -ranks[row])
        return [order[k % len(order)] for k in range(count)]  # a source may be smaller than a batch

    def _described(
        self, chosen: Sequence[tuple[int, int]], known: Mapping[str, float]
    ) -> dict[str, float]:
        drawn = [known.get(self._keys[source][row]) for source, row in chosen]
        every = [known.get(key) for keys in self._keys for key in keys]
        seen = [spread for spread in every if spread is not None]
        again = [spread for spread in drawn if spread is not None]
        return {
            "data/seen": len(seen) / len(every),
            "data/spread": statistics.fmean(seen) if seen else math.nan,
            "data/expected_spread": statistics.fmean(again) if again else math.nan,
        }

    def other(self, seed: int) -> Stream:
        same = copy.copy(self)  # shares the spreads, and the keys of the prompts
        same.seed = seed
        return same

    def metrics(self) -> dict[str, float]:
        return self._metrics

    def observe(self, step: int, prompts: Sequence[Prompt], spreads: Sequence[float]) -> None:
        pairs = zip(prompts, spreads, strict=True)
        self.spreads.add(step, {prompt_key(prompt): spread for prompt, spread in pairs})

    def state(self) -> dict[str, Any]:
        return self.spreads.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.spreads.restore(state)


def draw_shares(
    weights: Sequence[float], spreads: Sequence[float | None], floor: float
) -> list[float]:
    """The probability of each row to be drawn first: its share of the weights if all are flat."""
    highest = max((s for s in spreads if s is not None), default=0.0)
    if highest == 0.0:
        highest = 1.0  # all known prompts are flat: unseen prompts come first
    scaled = [
        weight * (highest if spread is None else spread)
        for weight, spread in zip(weights, spreads, strict=True)
    ]
    total, learnable = math.fsum(weights), math.fsum(scaled)
    if learnable == 0.0:
        return [weight / total for weight in weights]
    return [
        (1 - floor) * part / learnable + floor * weight / total
        for weight, part in zip(weights, scaled, strict=True)
    ]

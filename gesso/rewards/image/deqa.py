"""DeQA-Score (You et al. 2025): a picture's quality, by a model that was trained to rate it.

value = raw / 5, raw in [1, 5] as the model says it, so [.2, 1]; the division is Flow-GRPO's. The
model's own code wants an environment of its own, so it runs behind HTTP only: anything there that
answers /score with the raw value. A raw value outside the scale is a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gesso.rewards.base import Scorer
from gesso.types import Sample, Score


@dataclass(frozen=True)
class Scale:
    lowest: float
    highest: float


SCALE = Scale(1.0, 5.0)


class Rated:
    """In front of a server that rates on a scale: value = raw / highest."""

    def __init__(self, inner: Scorer, scale: Scale) -> None:
        self.inner = inner
        self.scale = scale

    @property
    def processes(self) -> int:
        return self.inner.processes

    @property
    def hits(self) -> int:
        return self.inner.hits

    @property
    def random(self) -> bool:
        return self.inner.random

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._rated(score) for score in await self.inner.score(samples)]

    def _rated(self, score: Score) -> Score:
        if score.value is None:
            return score
        low, high = self.scale.lowest, self.scale.highest
        if not low <= score.value <= high:
            return Score.failed(f"rated {score.value:g}, expected {low:g} to {high:g}")
        return replace(score, value=score.value / high, parts={**score.parts, "raw": score.value})

    async def close(self) -> None:
        await self.inner.close()

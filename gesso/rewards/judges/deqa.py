"""DeQA-Score (You et al. 2025): an image's quality, by a model that was trained to rate it.

value = raw / 5, raw in [1, 5] as the model returns it, so [.2, 1]; the division is Flow-GRPO's. The
model's code needs its own environment, so it runs behind HTTP only: any server there that answers
/score with the raw value. A raw value outside the scale is a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gesso.rewards.base import Scorer
from gesso.rewards.wrapper import ScorerWrapper
from gesso.types import Sample, Score


@dataclass(frozen=True)
class RatingScale:
    lowest: float
    highest: float


SCALE = RatingScale(1.0, 5.0)


class ScaledScorer(ScorerWrapper):
    """Wraps a server that rates on a scale: value = raw / highest."""

    def __init__(self, inner: Scorer, scale: RatingScale) -> None:
        super().__init__(inner)
        self.scale = scale

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._scaled(score) for score in await self.inner.score(samples)]

    def _scaled(self, score: Score) -> Score:
        if score.value is None:
            return score
        low, high = self.scale.lowest, self.scale.highest
        if not low <= score.value <= high:
            return Score.failed(f"rated {score.value:g}, expected {low:g} to {high:g}")
        return replace(score, value=score.value / high, parts={**score.parts, "raw": score.value})

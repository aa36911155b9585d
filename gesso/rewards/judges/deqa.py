"""DeQA-Score (You et al. 2025): image quality, predicted by a model trained on ratings.

value = raw / 5 with raw in [1, 5], the model's output, so the range is [.2, 1]; the division is
Flow-GRPO's. The model's code requires a separate environment, so it runs only over HTTP: any server
with a /score endpoint that returns the raw value. A raw value outside the scale is a failure.
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


def scaled(inner: Scorer) -> Scorer:
    """DeQA-Score (You et al. 2025): image quality, the raw value of the server, 1 to 5, divided by
    5 (Flow-GRPO). Range [0.2, 1]. `deqa/raw`: the raw value."""
    return ScaledScorer(inner, SCALE)


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
            return Score.failed(f"returned {score.value:g}, expected {low:g} to {high:g}")
        return replace(score, value=score.value / high, parts={**score.parts, "raw": score.value})

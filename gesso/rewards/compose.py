"""Several rewards as one: a weighted sum, each part logged by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from gesso.rewards.base import Scorer
from gesso.types import Sample, Score


@dataclass(frozen=True)
class Weighted:
    name: str
    weight: float
    scorer: Scorer  # where it runs


def combine(weighted: Sequence[tuple[str, float, Score]]) -> Score:
    """Σ weight·value. One failed part fails the sample: without it the sum is another reward."""
    parts: dict[str, float] = {}
    for name, _, score in weighted:
        if score.error is not None or score.value is None:
            return Score.failed(f"{name}: {score.error}")
        parts[name] = score.value
        parts |= {f"{name}/{detail}": value for detail, value in score.parts.items()}
    total = sum(weight * score.value for _, weight, score in weighted if score.value is not None)
    return Score(total, parts, " | ".join(s.text for _, _, s in weighted if s.text))


async def score(rewards: Sequence[Weighted], samples: Sequence[Sample]) -> list[Score]:
    columns = await asyncio.gather(*(r.scorer.score(samples) for r in rewards))
    return [
        combine([(r.name, r.weight, s) for r, s in zip(rewards, row, strict=True)])
        for row in zip(*columns, strict=True)
    ]

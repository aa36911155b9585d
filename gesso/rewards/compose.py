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
    """Σ weight·value over the rewards that apply to the sample; the others add nothing and have no
    part. One failed part fails the sample: without it the sum is another reward."""
    parts: dict[str, float] = {}
    total = 0.0
    for name, weight, score in weighted:
        if score.error is not None:
            return Score.failed(f"{name}: {score.error}")
        if score.value is None:
            continue
        total += weight * score.value
        parts[name] = score.value
        parts |= {f"{name}/{detail}": value for detail, value in score.parts.items()}
    if not parts:
        return Score.failed(f"{', '.join(n for n, _, _ in weighted)}: none applies to this sample")
    return Score(total, parts, " | ".join(s.text for _, _, s in weighted if s.text))


async def score(rewards: Sequence[Weighted], samples: Sequence[Sample]) -> list[Score]:
    columns = await asyncio.gather(*(r.scorer.score(samples) for r in rewards))
    return [
        combine([(r.name, r.weight, s) for r, s in zip(rewards, row, strict=True)])
        for row in zip(*columns, strict=True)
    ]

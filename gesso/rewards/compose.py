"""Several rewards as one: a weighted sum, each part logged by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from gesso.rewards.base import Reward, Scorer
from gesso.types import Sample, Score


@dataclass(frozen=True)
class Weighted:
    name: str
    weight: float
    scorer: Scorer  # where it runs


class Fitting:
    """In front of another scorer: samples whose prompt its reward cannot score do not go there; it
    does not apply to them."""

    def __init__(self, inner: Scorer, reward: Reward) -> None:
        self.inner = inner
        self.reward = reward

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
        fit = [self.reward.unfit(sample.prompt) is None for sample in samples]
        asked = [sample for sample, fits in zip(samples, fit, strict=True) if fits]
        scores = iter(await self.inner.score(asked) if asked else [])
        return [next(scores) if fits else Score(None) for fits in fit]

    async def close(self) -> None:
        await self.inner.close()


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

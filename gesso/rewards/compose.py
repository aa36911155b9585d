"""Several rewards as one: a weighted sum, each part logged by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from gesso.rewards import base
from gesso.rewards.base import Reward, Scorer
from gesso.types import Sample, Score, UserError


@dataclass(frozen=True)
class Weighted:
    name: str
    weight: float
    scorer: Scorer  # where it runs


class Fitting:
    """In front of another scorer: samples whose prompt its reward cannot score do not go there; it
    does not apply to them."""

    def __init__(self, inner: Scorer, reward: Reward, name: str) -> None:
        self.inner = inner
        self.reward = reward
        self.name = name

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
        apart = [self._apart(sample) for sample in samples]
        asked = [sample for sample, score in zip(samples, apart, strict=True) if score is None]
        scores = iter(await self.inner.score(asked) if asked else [])
        return [next(scores) if score is None else score for score in apart]

    def _apart(self, sample: Sample) -> Score | None:
        """The score of a sample that does not go there; None for the others."""
        try:
            reason = base.unfit(self.reward, sample.prompt, self.name)
        except UserError as error:
            return Score.failed(str(error))
        return Score(None) if reason else None

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
        share = weight * score.value
        if not abs(share) <= base.MAX_VALUE:  # nor is NaN
            return Score.failed(
                f"{name}: its weight {weight:g} times its value {score.value:g} is beyond "
                f"±{base.MAX_VALUE:g}"
            )
        total += share
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

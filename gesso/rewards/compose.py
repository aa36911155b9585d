"""Combines several rewards: a weighted sum, with each part logged separately."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gesso.rewards import base
from gesso.rewards.base import AnyReward, Scorer
from gesso.rewards.wrapper import ScorerWrapper
from gesso.types import Sample, Score, UserError


@dataclass(frozen=True)
class WeightedReward:
    name: str
    weight: float
    scorer: Scorer  # where it runs
    bounds: tuple[float, float] | None = None  # of its values


class OptionalScorer(ScorerWrapper):
    """Scores the samples with prompts that the reward can score; it does not apply to others."""

    def __init__(self, inner: Scorer, reward: AnyReward, name: str) -> None:
        super().__init__(inner)
        self.reward = reward
        self.name = name

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        skipped = [self._skipped(sample) for sample in samples]
        fit = [sample for sample, score in zip(samples, skipped, strict=True) if score is None]
        scores = iter(await self.inner.score(fit) if fit else [])
        return [next(scores) if score is None else score for score in skipped]

    def _skipped(self, sample: Sample) -> Score | None:
        """The score of a sample that is not passed to the inner scorer; None for the others."""
        try:
            reason = base.unfit(self.reward, sample.prompt, self.name)
        except UserError as error:
            return Score.failed(str(error))
        return Score(None) if reason else None


def clipped(score: Score, bounds: tuple[float, float] | None) -> Score:
    """The value within its bounds; the detail `unclipped` has the original."""
    if bounds is None or score.value is None:
        return score
    low, high = bounds
    value = min(max(score.value, low), high)
    return replace(score, value=value, parts={**score.parts, "unclipped": score.value})


def combine(weighted: Sequence[tuple[str, float, Score]]) -> Score:
    """Σ weight·value over the rewards that apply to the sample; the others contribute neither value
    nor part. One failed part fails the sample, which keeps the other parts: without it the sum
    would be a different reward."""
    parts: dict[str, float] = {}
    total, errors = 0.0, []
    for name, weight, score in weighted:
        if score.error is not None:
            errors.append(f"{name}: {score.error}")
            continue
        if score.value is None:
            continue
        share = weight * score.value
        if not abs(share) <= base.MAX_VALUE:  # also rejects NaN
            errors.append(
                f"{name}: weight {weight:g} times value {score.value:g} is outside "
                f"±{base.MAX_VALUE:g}"
            )
            continue
        total += share
        parts[name] = score.value
        parts |= {f"{name}/{detail}": value for detail, value in score.parts.items()}
    text = " | ".join(s.text for _, _, s in weighted if s.text)
    if errors:
        return Score(None, parts, text, errors[0])
    if not parts:
        names = ", ".join(name for name, _, _ in weighted)
        return Score.failed(f"{names}: no reward applies to this sample")
    return Score(total, parts, text)


async def score_columns(
    rewards: Sequence[WeightedReward], samples: Sequence[Sample]
) -> list[list[Score]]:
    """The scores of each reward, one list per reward."""
    return list(await asyncio.gather(*(r.scorer.score(samples) for r in rewards)))


def total(rewards: Sequence[WeightedReward], scores: Sequence[Score]) -> Score:
    """The score of one sample from one score per reward."""
    pairs = zip(rewards, scores, strict=True)
    return combine([(r.name, r.weight, clipped(s, r.bounds)) for r, s in pairs])

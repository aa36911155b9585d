"""Rewards of images over the frames of a video.

`frames` and `every` of a reward's entry say which frames are scored, and which of their scores
count; the score of the video is the mean of those. Every image reward, local or served, scores
videos this way, and one with a gradient keeps it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gesso.rewards.base import Scorer
from gesso.rewards.wrapper import ScorerWrapper
from gesso.types import Sample, Score

if TYPE_CHECKING:
    from torch import Tensor

RANKED = re.compile(r"(worst|best)(?:-(\d+))?")


@dataclass(frozen=True)
class FrameChoice:
    """`rule`: "mean", "first", "last", "first-last", or "worst" and "best", as "worst-3" with the
    number of frames that count. `every`: only every k-th frame is scored, from the first."""

    rule: str
    every: int = 1

    def scored(self, frames: int) -> list[int]:
        """Indices of the frames that are scored, of a video with `frames`."""
        ends = {"first": [0], "last": [frames - 1], "first-last": [0, frames - 1]}
        return ends.get(self.rule) or list(range(0, frames, self.every))

    def fault(self, frames: int) -> str | None:
        """Why videos with `frames` do not have as many scores as should count, or None."""
        ranked, most = RANKED.fullmatch(self.rule), len(self.scored(frames))
        if ranked is None or int(ranked[2] or 1) <= most:
            return None
        return (
            f'frames = "{self.rule}", but only {most} of the {frames} frames of a video are '
            f'scored; use at most "{ranked[1]}-{most}"'
        )

    def counted(self, values: Sequence[float]) -> list[int]:
        """Which of these values count: their indices, in order."""
        ranked = RANKED.fullmatch(self.rule)
        if ranked is None:
            return list(range(len(values)))
        order = sorted(range(len(values)), key=values.__getitem__, reverse=ranked[1] == "best")
        return sorted(order[: int(ranked[2] or 1)])

    def value(self, values: Tensor) -> Tensor:
        """(N, scored frames) → (N,), with gradient."""
        import torch

        return torch.stack([row[self.counted(row.tolist())].mean() for row in values])


class FrameScorer(ScorerWrapper):
    """Scores videos by a scorer of images."""

    def __init__(self, inner: Scorer, choice: FrameChoice) -> None:
        super().__init__(inner)
        self.choice = choice

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Groupwise rewards get one frame of all samples at a time."""
        indices = [self.choice.scored(len(s.frames)) if s.is_video else [0] for s in samples]
        if not self.groupwise:
            images = [_frame(s, i) for s, of in zip(samples, indices, strict=True) for i in of]
            scores = iter(await self.inner.score(images) if images else [])
            columns = [[next(scores) for _ in of] for of in indices]
        else:
            rows = [await self.inner.score([_frame(s, i) for s in samples]) for i in indices[0]]
            columns = [list(column) for column in zip(*rows, strict=True)]
        return [self._of_video(of, each) for of, each in zip(indices, columns, strict=True)]

    def _of_video(self, indices: Sequence[int], scores: Sequence[Score]) -> Score:
        """One frame without a score fails the video: without it the mean would be another one."""
        if len(scores) == 1:
            return scores[0]
        for index, score in zip(indices, scores, strict=True):
            if score.error is not None:
                return Score.failed(f"frame {index}: {score.error}")
        applying = [(score, score.value) for score in scores if score.value is not None]
        if not applying:
            return scores[0]
        counted = [applying[i][0] for i in self.choice.counted([value for _, value in applying])]
        names = dict.fromkeys(name for score in counted for name in score.parts)
        parts = {n: statistics.fmean(s.parts[n] for s in counted if n in s.parts) for n in names}
        text = " / ".join(dict.fromkeys(score.text for score in counted if score.text))
        return Score(statistics.fmean(s.value for s in counted if s.value is not None), parts, text)


def _frame(sample: Sample, index: int) -> Sample:
    return replace(sample, image=sample.frames[index], fps=None) if sample.is_video else sample

"""Scores of a model with several heads, on a server that returns them as details.

EditReward (Wu et al. 2025): instruction following and visual quality of an edit, unbounded; value =
their mean, as in UniRL. The server receives the instruction, the source and the result.
VideoAlign (Liu et al. 2025): visual quality, motion quality and text alignment of a video, each
normalised to mean 0 and variance 1 by the checkpoint; value = their sum, its "Overall". The server
receives the prompt, the frames and fps.

The models' code requires separate environments, so they run only over HTTP: any server with a
/score endpoint.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from gesso.rewards.base import RemoteReward, Scorer
from gesso.rewards.edits import no_source
from gesso.rewards.wrapper import ScorerWrapper
from gesso.types import Prompt, Sample, Score


class OfEdits(RemoteReward):
    """Accepts prompts with an input image."""

    def unfit(self, prompt: Prompt) -> str | None:
        return no_source(prompt)


class Heads(ScorerWrapper):
    """Wraps a server that returns the heads `names`: value = `total` of them, whatever value it
    returns."""

    def __init__(
        self, inner: Scorer, names: Sequence[str], total: Callable[[Iterable[float]], float]
    ) -> None:
        super().__init__(inner)
        self.names, self.total = names, total

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._combined(score) for score in await self.inner.score(samples)]

    def _combined(self, score: Score) -> Score:
        if score.error is not None:
            return score
        if any(name not in score.parts for name in self.names):
            *first, last = (f'"{name}"' for name in self.names)
            got = ", ".join(score.parts) or "none"
            return Score.failed(f"expected the details {', '.join(first)} and {last}, got {got}")
        return replace(score, value=self.total(score.parts[name] for name in self.names))


def edit_reward(inner: Scorer) -> Scorer:
    """EditReward (Wu et al. 2025): the mean of its heads, the details `following` and `quality`,
    for an instruction, source and result. Unbounded."""
    return Heads(inner, ("following", "quality"), statistics.fmean)


def video_align(inner: Scorer) -> Scorer:
    """VideoAlign (Liu et al. 2025): the sum of its heads, the details `vq` (visual quality), `mq`
    (motion quality) and `ta` (text alignment) of a video. Unbounded."""
    return Heads(inner, ("vq", "mq", "ta"), sum)

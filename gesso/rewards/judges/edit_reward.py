"""EditReward (Wu et al. 2025): an edit rated by a model with two heads, on a server.

The heads, instruction following and visual quality, are unbounded; value = their mean, as in UniRL.
The model's code requires a separate environment, so it runs only over HTTP: any server with a
/score endpoint that returns both as the details "following" and "quality". It receives the
instruction, the source and the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gesso.rewards.base import RemoteReward
from gesso.rewards.edits import no_source
from gesso.rewards.wrapper import ScorerWrapper
from gesso.types import Prompt, Sample, Score

HEADS = ("following", "quality")


class OfEdits(RemoteReward):
    """Accepts prompts with an input image."""

    def unfit(self, prompt: Prompt) -> str | None:
        return no_source(prompt)


class TwoHeads(ScorerWrapper):
    """Wraps a server that returns both heads: value = their mean, whatever value it returns."""

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._mean(score) for score in await self.inner.score(samples)]

    def _mean(self, score: Score) -> Score:
        if score.error is not None:
            return score
        missing = [name for name in HEADS if name not in score.parts]
        if missing:
            got = ", ".join(score.parts) or "none"
            return Score.failed(f'expected the details "following" and "quality", got {got}')
        return replace(score, value=sum(score.parts[name] for name in HEADS) / len(HEADS))

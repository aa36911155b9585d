"""Win rates within a group by a judge that compares two samples (Pref-GRPO, Wang et al. 2025)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gesso.formulas.comparisons import win_rates
from gesso.rewards.base import Scorer
from gesso.rewards.judges.chat import MAX_TEXT_KEPT, ChatClient, ServedJudge, Unanswered
from gesso.types import Sample, Score

POINTS = {"1": 1.0, "2": 0.0, "0": 0.5}  # of the sample that is shown first
_VERDICT = re.compile(r"Better:\s*([012])(?!\.?\w)")
_END = (
    "Give your reasons in at most three sentences. Then end with one line: Better: 1, Better: 2, "
    "or Better: 0 if they are equally good."
)


class WinRate(ServedJudge):
    """Groupwise: the share of the other samples of its prompt that a sample beats, according to a
    served model that compares two at a time (Pref-GRPO, Wang et al. 2025). Every pair is judged in
    both orders; a tie, or an answer without one verdict, counts ½. `win-rate/unreadable`: share of
    such answers. `win-rate/first`: share of wins of the sample that is shown first; far from .5 the
    judge prefers a position. A group of n takes n (n − 1) requests. A question of your own
    (`prompt`) must ask for "Better: 1", "2" or "0"; texts are `{first}` and `{second}`."""

    TEMPLATE: ClassVar[str] = (
        "Two images were generated for this prompt: {prompt}\n"
        "Compare the last two images: the first of them is number 1, the second number 2. Which is "
        "better? Most important is whether it shows what the prompt says, then how good it looks. "
        f"Their order means nothing. {_END}"
    )
    TEXT_TEMPLATE: ClassVar[str] = (
        "Two answers were given to this prompt: {prompt}\n\nAnswer 1:\n{first}\n\nAnswer 2:\n"
        "{second}\n\nWhich is better? Most important is whether it is correct, then how clear it "
        f"is. Neither order nor length matters. {_END}"
    )
    OF_SAMPLES: ClassVar[tuple[str, ...]] = ("first", "second")

    def scorer(self) -> Scorer:
        return PairScorer(self)

    def score_group(self, samples: Sequence[Sample]) -> list[Score]:
        return asyncio.run(self.score_once(samples))

    def question(self, first: Sample, second: Sample) -> str:
        texts = {"first": first.text or "", "second": second.text or ""}
        own = self.prompt or first.text is None
        return self.filled(self.wording if own else self.TEXT_TEMPLATE, first.prompt, texts)


@dataclass(frozen=True)
class Comparison:
    """Two samples, by their positions in the group, in the order in which they were shown."""

    first: int
    second: int
    response: str = ""
    error: str | None = None

    @property
    def verdict(self) -> str | None:
        """The only verdict in the response; None if there is none, or several."""
        found = {match[1] for match in _VERDICT.finditer(self.response)}
        return found.pop() if len(found) == 1 else None

    @property
    def points(self) -> float:
        """Points of the sample that was shown first."""
        return 0.5 if self.verdict is None else POINTS[self.verdict]


class PairScorer(ChatClient):
    """Runs a judge of pairs. A request that fails fails the two samples that it compares."""

    groupwise = True

    def __init__(self, judge: WinRate) -> None:
        super().__init__(judge)
        self.judge = judge

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        count = len(samples)
        if count < 2:
            return [Score.failed("expected at least 2 samples of the prompt, got 1")] * count
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        found = await asyncio.gather(*(self._compare(samples, i, j) for i, j in pairs))
        first = np.full((count, count), 0.5)
        for each in found:
            first[each.first, each.second] = each.points
        rates = win_rates(first).tolist()
        return [
            _score(i, rates[i], [c for c in found if i in (c.first, c.second)])
            for i in range(count)
        ]

    async def _compare(self, samples: Sequence[Sample], i: int, j: int) -> Comparison:
        one, other = samples[i], samples[j]
        try:
            response = await self.ask(self.judge.question(one, other), [one, other])
        except Unanswered as error:
            return Comparison(i, j, error=str(error))
        return Comparison(i, j, response)


def _score(sample: int, rate: float, own: Sequence[Comparison]) -> Score:
    """The score of a sample from all comparisons that it took part in."""
    for each in own:
        if each.error is not None:
            other = each.second if each.first == sample else each.first
            return Score.failed(f"comparison with sample {other + 1} of the prompt: {each.error}")
    parts = {
        "unreadable": sum(c.verdict is None for c in own) / len(own),
        "first": sum(c.points for c in own) / len(own),
    }
    shown = [
        f"1 is this sample, 2 is sample {c.second + 1}: {c.response}"
        for c in own
        if c.first == sample
    ]
    return Score(rate, parts, "\n".join(shown)[:MAX_TEXT_KEPT])

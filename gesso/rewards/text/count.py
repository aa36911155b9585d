"""Counting: is the whole number in <answer>…</answer> the expected one?

value = 1 if it equals the row's answer, else 0; with `graded`, 1 − |n − n̂|/max(|n|, 1), at
least 0. Accepts only digits with an optional sign: "4 dogs" or "four" is 0. Details: "exact" and
"answered". No dependencies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import Field

from gesso.config import Strict
from gesso.rewards.text import answers
from gesso.types import Prompt, Sample, Score

_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")


class Count(Strict):
    """1 if the whole number in the last answer tag equals the reference, otherwise 0.
    `count/answered`: a number could be read."""

    tag: str = Field("answer", pattern=answers.TAG)
    """Tag around the answer."""
    column: str = answers.COLUMN
    """Column with the reference answer."""
    graded: bool = False
    """True: 1 − |n − n̂| / max(|n|, 1), at least 0."""

    def unfit(self, prompt: Prompt) -> str | None:
        return (
            None
            if number(answers.expected_answer(prompt, self.column)) is not None
            else answers.missing_answer(prompt, self.column, "4")
        )

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        expected = number(answers.expected_answer(sample.prompt, self.column))
        if expected is None:
            return Score.failed(answers.missing_answer(sample.prompt, self.column, "4"))
        answer = answers.last_tagged(sample.response, self.tag)
        count = number(answer)
        exact = float(count == expected)
        error = None if count is None else abs(count - expected) / max(abs(expected), 1)
        graded = 0.0 if error is None else max(0.0, 1 - error)
        details = {"exact": exact, "answered": float(count is not None)}
        return Score(graded if self.graded else exact, details, answer or "no answer")


def number(text: str | None) -> int | None:
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None

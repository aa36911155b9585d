"""Multiple choice: is the letter in <answer>…</answer> the expected one?

value = 1 if it equals the row's answer, else 0. Accepts a capital from A to Z, alone or as "(B)",
"B)", "B." or "B:"; anything else, such as a second letter, is 0. Detail: "answered". No
dependencies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import Field

from gesso.config import Strict
from gesso.rewards.text import answers
from gesso.types import Prompt, Sample, Score

_LETTER = re.compile(r"\(([A-Z])\)|([A-Z])[.):]?")


class Choice(Strict):
    """1 if the letter in the last answer tag equals the reference, otherwise 0; accepts `B`, `(B)`,
    `B)`, `B.` and `B:`."""

    tag: str = Field("answer", pattern=answers.TAG)
    """Tag around the answer."""
    column: str = answers.COLUMN
    """Column with the reference answer."""

    def unfit(self, prompt: Prompt) -> str | None:
        return (
            None
            if letter(answers.expected_answer(prompt, self.column))
            else answers.missing_answer(prompt, self.column, '"B"')
        )

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        if reason := self.unfit(sample.prompt):
            return Score.failed(reason)
        expected = letter(answers.expected_answer(sample.prompt, self.column))
        answer = answers.last_tagged(sample.response, self.tag)
        choice = letter(answer)
        details = {"answered": float(choice is not None)}
        return Score(float(choice == expected), details, answer or "no answer")


def letter(text: str | None) -> str | None:
    match = _LETTER.fullmatch(text) if text is not None else None
    return (match.group(1) or match.group(2)) if match else None

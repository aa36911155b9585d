"""The judge `judge`, whose question and scale are the user's, and how a rating is parsed."""

from __future__ import annotations

import re

from pydantic import model_validator

from gesso.rewards.judges.chat import MAX_TEXT_KEPT, ChatJudge
from gesso.types import Sample, Score


class Judge(ChatJudge):
    """Your own question: `prompt` is its file, `pattern` finds the number in the answer."""

    pattern: str = r"Final Score:\s*(-?\d+(?:\.\d+)?)"
    lowest: float = 1.0
    highest: float = 5.0  # the value is the number / highest

    @model_validator(mode="after")
    def _has_scale(self) -> Judge:
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(
                f"pattern {self.pattern!r} is no regular expression: {error}"
            ) from None
        if groups != 1:
            raise ValueError(
                f"pattern {self.pattern!r} has {groups} groups; expected 1, the number"
            )
        if not self.lowest < self.highest or self.highest <= 0:
            raise ValueError("lowest must lie below highest, and highest above 0")
        return self

    def read(self, answer: str, sample: Sample) -> Score:
        return parse_rating(answer, self.pattern, self.lowest, self.highest)


def parse_rating(answer: str, pattern: str, lowest: float, highest: float) -> Score:
    """number / highest. The answer must hold exactly one such number, on the scale."""
    numbers = {m[1] for m in re.finditer(rf"(?:{pattern})(?!\.?\d)", answer)}
    excerpt = answer[-200:].strip()
    if len(numbers) != 1:
        what = "says no score" if not numbers else f"says {len(numbers)} different scores"
        return Score.failed(f"the answer {what}: …{excerpt!r}")
    try:
        number = float(numbers.pop())
    except ValueError as error:
        return Score.failed(f"the answer's score is no number: {error}")
    if not lowest <= number <= highest:
        return Score.failed(f"the answer's score {number:g} is not in [{lowest:g}, {highest:g}]")
    return Score(number / highest, text=answer[:MAX_TEXT_KEPT])

"""The judge `judge`, with a custom question and scale, and the parser of ratings."""

from __future__ import annotations

import re

from pydantic import model_validator

from gesso.rewards.judges.chat import MAX_TEXT_KEPT, ChatJudge
from gesso.types import Sample, Score


class Judge(ChatJudge):
    """A custom question to a served model: `prompt` is the file with the question, `pattern`
    extracts the score. The value is score / highest; a score outside [lowest, highest] fails."""

    pattern: str = r"Final Score:\s*(-?\d+(?:\.\d+)?)"
    """Regular expression; its first group is the score."""
    lowest: float = 1.0
    """Lowest valid score."""
    highest: float = 5.0
    """Highest valid score."""

    @model_validator(mode="after")
    def _has_scale(self) -> Judge:
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(
                f"pattern {self.pattern!r} is not a regular expression: {error}"
            ) from None
        if groups != 1:
            raise ValueError(
                f"pattern {self.pattern!r} has {groups} groups; expected 1 (the number)"
            )
        if not self.lowest < self.highest or self.highest <= 0:
            raise ValueError("lowest must be less than highest, and highest greater than 0")
        return self

    def read(self, response: str, sample: Sample) -> Score:
        return parse_rating(response, self.pattern, self.lowest, self.highest)


def parse_rating(response: str, pattern: str, lowest: float, highest: float) -> Score:
    """number / highest. The response must contain exactly one such number, on the scale."""
    numbers = {m[1] for m in re.finditer(rf"(?:{pattern})(?!\.?\d)", response)}
    excerpt = response[-200:].strip()
    if len(numbers) != 1:
        count = f"{len(numbers)} different scores" if numbers else "no score"
        return Score.failed(f"the response contains {count}: …{excerpt!r}")
    try:
        number = float(numbers.pop())
    except ValueError as error:
        return Score.failed(f"the score in the response is not a number: {error}")
    if not lowest <= number <= highest:
        return Score.failed(f"the score {number:g} is not in [{lowest:g}, {highest:g}]")
    return Score(number / highest, text=response[:MAX_TEXT_KEPT])

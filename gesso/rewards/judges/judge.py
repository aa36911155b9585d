"""The judge `judge`, with a custom question and scale, and the parser of ratings."""

from __future__ import annotations

import re

from pydantic import model_validator

from gesso.rewards.judges.chat import MAX_TEXT_KEPT, ChatJudge
from gesso.rewards.judges.templates import TEMPLATES
from gesso.types import Sample, Score


class Judge(ChatJudge):
    """A question to a served model: one of the bundled ones (`template`), or a file of your own
    (`prompt`), from whose answer `pattern` extracts the score. The value is score / highest; a
    score outside [lowest, highest] fails."""

    template: str = ""
    """Bundled question: "alignment" (does the image show what the prompt says), "aesthetics" or
    "text" (is the text in it right and legible). The judge rates from 1 to 5 and ends with
    "Final Score: n"."""

    pattern: str = r"Final Score:\s*(-?\d+(?:\.\d+)?)"
    """Regular expression; its first group is the score."""
    lowest: float = 1.0
    """Lowest valid score."""
    highest: float = 5.0
    """Highest valid score."""

    @model_validator(mode="after")
    def _has_wording(self) -> Judge:
        known = ", ".join(TEMPLATES)
        if not self.template:
            if not self.wording:
                raise ValueError(
                    f'"prompt" is missing; expected a file with the question, or template = one of '
                    f"{known}"
                )
            return self
        if self.template not in TEMPLATES:
            raise ValueError(f'template = "{self.template}" is unknown; use one of {known}')
        fixed = Judge.model_fields
        for key in ("prompt", "pattern", "lowest", "highest"):
            if getattr(self, key) != fixed[key].default:
                raise ValueError(f'template = "{self.template}" fixes {key}; remove one of them')
        return self

    @property
    def wording(self) -> str:
        return TEMPLATES.get(self.template) or super().wording

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

"""Format: one <think>…</think>, then one <answer>…</answer>, and nothing else.

value = 1 if the whole response matches, ignoring whitespace around either block, else 0: an extra
or missing tag, a different order, text outside the tags or an empty answer is 0. With chat
templates that end in <think> (DeepSeek-R1's distills) the response begins inside the block: set
`opened`, and the opening tag is not expected. No dependencies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import Field

from gesso.config import Strict
from gesso.rewards.text import answers
from gesso.types import Prompt, Sample, Score


class Format(Strict):
    """1 if the response is one reasoning block and one answer block and nothing else, otherwise 0
    (DeepSeek-R1)."""

    think: str = Field("think", pattern=answers.TAG)
    """Tag of the reasoning."""
    answer: str = Field("answer", pattern=answers.TAG)
    """Tag of the answer."""
    opened: bool = False
    """The chat template already opens the reasoning tag, as DeepSeek-R1's distilled models do."""

    def unfit(self, prompt: Prompt) -> str | None:
        return None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        pattern = self._pattern()
        return [Score(float(bool(pattern.fullmatch(s.response)))) for s in samples]

    def _pattern(self) -> re.Pattern[str]:
        plain = rf"(?:(?!</?(?:{self.think}|{self.answer})>).)*"  # any text without these tags
        thought = rf"{'' if self.opened else f'<{self.think}>'}{plain}</{self.think}>"
        answer = rf"<{self.answer}>(?=\s*[^\s<]|\s*<(?!/{self.answer}>)){plain}</{self.answer}>"
        return re.compile(rf"\s*{thought}\s*{answer}\s*", re.DOTALL)

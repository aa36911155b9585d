"""Format: one <think>…</think>, then one <answer>…</answer>, and nothing else.

value = 1 where the whole response matches, white space around either ignored, else 0: an extra or
missing tag, another order, text outside or an empty answer is 0. With chat templates that end in
<think> (DeepSeek-R1's distills) the response begins inside it: set `opened`, and the first tag is
not expected. Needs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import Field

from gesso.config import Strict
from gesso.rewards.text import answers
from gesso.types import Prompt, Sample, Score


class Format(Strict):
    think: str = Field("think", pattern=answers.TAG)  # names of the tags
    answer: str = Field("answer", pattern=answers.TAG)
    opened: bool = False  # the chat template has written the first tag

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

"""EditScore (Luo et al. 2025): four ratings of an edit by a served vision-language model."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from gesso.rewards.base import Scorer
from gesso.rewards.edits import no_source
from gesso.rewards.judges.chat import (
    MAX_TEXT_KEPT,
    ChatClient,
    ServedJudge,
    Unanswered,
    read_template,
)
from gesso.types import Prompt, Sample, Score

_NUMBER = r"(-?\d+(?:\.\d+)?)"
_SCORES = re.compile(rf'"score"\s*:\s*\[\s*{_NUMBER}\s*,\s*{_NUMBER}\s*\]')
_END = (
    'Answer with JSON only: {"reasoning": "at most three sentences", "score": [a, b]}, where both '
    "are numbers from 0 (worst) to 25 (best)."
)


class EditScore(ServedJudge):
    """An edit rated by a served VLM, as EditScore does (Luo et al. 2025): two questions, each with
    two ratings from 0 to 25, and √(min(following, consistency) · min(naturalness, artifacts)) / 25.
    Range [0, 1]. The details are the four ratings / 25. The questions have the form of its training
    data; put the exact wording into files to use it. Environment: `EDIT_SCORE_VLLM_URL`,
    `EDIT_SCORE_PATH`."""

    quality_prompt: str = ""
    """File with the second question, which sees only the edited image; "" uses the built-in one."""
    highest: float = Field(25.0, gt=0)
    """Best rating."""

    URL_ENV: ClassVar[str] = "EDIT_SCORE_VLLM_URL"
    MODEL_ENV: ClassVar[str] = "EDIT_SCORE_PATH"
    TEMPLATE: ClassVar[str] = (
        "The last image is an edit of the images before it, made for this instruction: {prompt}\n"
        "Rate two things. First: does the edit do what the instruction says, all of it and in the "
        "right place? Second: is everything that the instruction does not mention the same as "
        f"before (identity, layout, background, style)? {_END}"
    )
    QUALITY: ClassVar[str] = (
        "This image was edited by a model. Rate two things. First: does it look natural (light, "
        "shadows, proportions, perspective)? Second: is it free of artefacts (distortions, blur, "
        f"seams, garbled objects or anatomy)? {_END}"
    )

    def unfit(self, prompt: Prompt) -> str | None:
        return no_source(prompt) or super().unfit(prompt)

    def scorer(self) -> Scorer:
        return EditScorer(self)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return asyncio.run(self.score_once(samples))

    def questions(self, prompt: Prompt) -> list[str]:
        quality = read_template(self.quality_prompt) if self.quality_prompt else self.QUALITY
        return [self.filled(wording, prompt, {}) for wording in (self.wording, quality)]

    def ratings(self, response: str) -> tuple[float, float]:
        """Raises `Unanswered` unless the response has exactly one pair of ratings on the scale."""
        pairs = {(float(m[1]), float(m[2])) for m in _SCORES.finditer(response)}
        excerpt = response[-200:].strip()
        if len(pairs) != 1:
            count = f"{len(pairs)} pairs of scores" if pairs else 'no "score": [a, b]'
            raise Unanswered(f"the response contains {count}: …{excerpt!r}")
        pair = pairs.pop()
        if not all(0 <= rating <= self.highest for rating in pair):
            raise Unanswered(f"the scores {list(pair)} are not in [0, {self.highest:g}]")
        return pair


class EditScorer(ChatClient):
    """Asks both questions about each sample."""

    groupwise = False

    def __init__(self, judge: EditScore) -> None:
        super().__init__(judge)
        self.judge = judge

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        return list(await asyncio.gather(*(self._score(sample) for sample in samples)))

    async def _score(self, sample: Sample) -> Score:
        alone = replace(sample, prompt=replace(sample.prompt, images=()))
        edit, quality = self.judge.questions(sample.prompt)
        try:
            responses = await asyncio.gather(self.ask(edit, [sample]), self.ask(quality, [alone]))
            pairs = [self.judge.ratings(response) for response in responses]
        except Unanswered as error:
            return Score.failed(str(error))
        names = ("following", "consistency", "naturalness", "artifacts")
        ratings = [rating / self.judge.highest for pair in pairs for rating in pair]
        text = "\n".join(responses)[:MAX_TEXT_KEPT]
        return Score(edit_score(*ratings), dict(zip(names, ratings, strict=True)), text)


def edit_score(following: float, consistency: float, naturalness: float, artifacts: float) -> float:
    """The geometric mean of the worse rating of each question."""
    return math.sqrt(min(following, consistency) * min(naturalness, artifacts))

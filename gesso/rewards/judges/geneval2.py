"""GenEval 2 (Kamath et al. 2025): questions about an image, answered by a served model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from gesso.rewards.base import Scorer
from gesso.rewards.judges.chat import (
    FIRST_TOKEN,
    ChatClient,
    ServedJudge,
    Unanswered,
    first_token,
)
from gesso.types import Prompt, Sample, Score

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


class Geneval2(ServedJudge):
    """Soft-TIFA of GenEval 2 (Kamath et al. 2025): a served VLM (the authors use
    Qwen3-VL-8B-Instruct) answers each question of the row in one word, and the score of a question
    is the probability of the right word. Range [0, 1]. Rows are those of `geneval2_data.jsonl`:
    `vqa_list` has pairs of a question and its answer, `skills` their kinds. `geneval2/atoms` is the
    arithmetic mean; `geneval2/count`, `/object`, `/attribute`, `/position` and `/verb` are the
    means of their kind. Requires a server with `logprobs`; of words beyond its 20 likeliest the
    probability counts as 0. One request per question."""

    mean: Literal["geometric", "arithmetic"] = "geometric"
    """Mean of the questions: "geometric" (Soft-TIFA GM, prompts as a whole) or "arithmetic"."""

    TEMPLATE: ClassVar[str] = "{question} Answer in one word."
    OF_SAMPLES: ClassVar[tuple[str, ...]] = ("question",)

    def unfit(self, prompt: Prompt) -> str | None:
        return _fault(prompt.columns) or super().unfit(prompt)

    def scorer(self) -> Scorer:
        return QuestionScorer(self)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return asyncio.run(self.score_once(samples))

    def question(self, text: str, prompt: Prompt) -> str:
        return self.filled(self.wording, prompt, {"question": text})


class QuestionScorer(ChatClient):
    """Asks all questions about a sample at the same time. One that fails fails the sample."""

    OPTIONS: ClassVar[Mapping[str, Any]] = FIRST_TOKEN

    groupwise = False

    def __init__(self, judge: Geneval2) -> None:
        super().__init__(judge)
        self.judge = judge

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        return list(await asyncio.gather(*(self._score(sample) for sample in samples)))

    async def _score(self, sample: Sample) -> Score:
        columns = sample.prompt.columns
        pairs = columns["vqa_list"]
        try:
            right = await asyncio.gather(*(self._right(sample, *pair) for pair in pairs))
        except Unanswered as error:
            return Score.failed(str(error))
        skills = columns.get("skills", [])
        kinds = {
            kind: arithmetic([p for p, own in zip(right, skills, strict=True) if own == kind])
            for kind in dict.fromkeys(skills)
        }
        means = {"geometric": geometric(right), "arithmetic": arithmetic(right)}
        text = "\n".join(f"{p:.2f}  {q} {a}" for p, (q, a) in zip(right, pairs, strict=True))
        return Score(means[self.judge.mean], {"atoms": means["arithmetic"], **kinds}, text)

    async def _right(self, sample: Sample, question: str, answer: str) -> float:
        completion = await self.complete(self.judge.question(question, sample.prompt), [sample])
        words = accepted(answer)
        return min(1.0, sum(p for token, p in first_token(completion) if token.lower() in words))


def accepted(answer: str) -> set[str]:
    """A number may be answered as a word or in digits; case and spaces do not matter."""
    word = answer.strip().lower()
    return {word, str(NUMBERS.index(word) + 1)} if word in NUMBERS else {word}


def arithmetic(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def geometric(values: Sequence[float]) -> float:
    return math.exp(arithmetic([math.log(v) for v in values])) if min(values) > 0 else 0.0


def _fault(columns: Mapping[str, Any]) -> str | None:
    """What the columns of a row lack."""
    pairs, skills = columns.get("vqa_list"), columns.get("skills", [])
    if not isinstance(pairs, Sequence) or not pairs or not all(map(_is_pair, pairs)):
        return 'expected a column "vqa_list" with pairs of a question and its answer'
    if skills and len(skills) != len(pairs):
        return f'expected one of "skills" per question, got {len(skills)} for {len(pairs)}'
    return None


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, Sequence) and len(value) == 2 and all(isinstance(v, str) for v in value)
    )

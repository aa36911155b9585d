r"""Mathematics: is the answer mathematically equal to the expected one?

value = 1 if math-verify judges the response's answer equal to the row's (`column`), else 0. The
response's answer is the content of its last \boxed{}, inside <answer>…</answer> if the tags are
present; without a box, everything between the tags. No answer, or one that cannot be parsed, is 0.
A row with an answer that cannot be parsed is rejected before the run and never scored. Detail:
"answered". Requires the extra `math`. EasyR1 trains on .9 · math + .1 · format: two [[reward]]
entries with these weights.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from gesso.config import Strict
from gesso.rewards.text import answers
from gesso.types import Prompt, Sample, Score, UserError

_WORDS = re.compile(r"[A-Za-z][A-Za-z\s]{2,}")  # math-verify would parse it as a product of letters
_DECIMAL = re.compile(r"-?[0-9]+(\.[0-9]+)?")  # skips the parser, which takes 10 ms per call
_MAX_LENGTH = 500  # characters of an answer


class Math(Strict):
    r"""1 if the response's answer equals the reference answer mathematically, otherwise 0, by
    math-verify. The answer is the last `\boxed{}` in the last answer tag, or in the response if
    there is no tag. Requires the extra `math`. `math/answered`: an answer could be parsed."""

    tag: str = Field("answer", pattern=answers.TAG)
    """Tag around the answer."""
    column: str = answers.COLUMN
    """Column with the reference answer."""
    timeout: int = Field(5, ge=1)
    """Seconds to parse or compare an answer."""

    def unfit(self, prompt: Prompt) -> str | None:
        gold = answers.expected_answer(prompt, self.column)
        if gold is None:
            return answers.missing_answer(prompt, self.column, r'"\frac{3}{4}"')
        if _WORDS.fullmatch(gold) or not (
            _DECIMAL.fullmatch(gold) or parse_latex(gold, self.timeout)
        ):
            return f'column "{self.column}" is {gold!r}, which cannot be parsed; fix the row'
        return None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        if reason := self.unfit(sample.prompt):
            return Score.failed(reason)
        answer = extract_answer(sample.response, self.tag)
        expressions = parse_latex(answer, self.timeout) if answer else []
        gold = parse_latex(answers.expected_answer(sample.prompt, self.column) or "", self.timeout)
        equal = bool(expressions) and _math_verify().verify(
            gold, expressions, timeout_seconds=self.timeout
        )
        return Score(float(equal), {"answered": float(bool(expressions))}, answer or "no answer")


@functools.lru_cache(maxsize=1024)
def parse_latex(answer: str, timeout: int) -> list[Any]:
    """LaTeX as sympy expressions; [] if it cannot be parsed. Never calls Python's eval."""
    if len(answer) > _MAX_LENGTH:
        return []
    library = _math_verify()
    inner = answers.last_boxed(answer)
    return library.parse(
        rf"\boxed{{{answer if inner is None else inner}}}",
        [library.LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=timeout,
    )


def extract_answer(response: str, tag: str) -> str | None:
    tagged = answers.last_tagged(response, tag)
    boxed = answers.last_boxed(response if tagged is None else tagged)
    return tagged if boxed is None else boxed


def _math_verify() -> Any:
    try:
        import math_verify
    except ImportError as error:
        raise UserError('reward "math" requires math-verify: pip install "gesso[math]"') from error
    return math_verify

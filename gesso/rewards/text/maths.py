r"""Mathematics: is the answer the row's, however it is written?

value = 1 where math-verify finds the reply's answer equal to the row's (`column`), else 0. The
reply's answer is what its last \boxed{} holds, within <answer>…</answer> where there is one;
without a box, all between the tags. No answer, or one that cannot be parsed, is 0. A row whose own
answer cannot be parsed is refused before the run and never scored. Detail: "answered". Needs the
extra `math`. EasyR1 trains on .9 · math + .1 · format: two [[reward]] with these weights.
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

_WORDS = re.compile(r"[A-Za-z][A-Za-z\s]{2,}")  # would pass for a product of letters
_DECIMAL = re.compile(r"-?[0-9]+(\.[0-9]+)?")  # needs no parser, of which a call takes 10 ms
_LONGEST = 500  # characters of an answer


class Math(Strict):
    tag: str = Field("answer", pattern=answers.TAG)
    column: str = answers.COLUMN  # of the data, that holds the right answer
    timeout: int = Field(5, ge=1)  # seconds to parse or to compare; longer counts as different

    def unfit(self, prompt: Prompt) -> str | None:
        gold = answers.wanted(prompt, self.column)
        if gold is None:
            return answers.missing(prompt, self.column, r'"\frac{3}{4}"')
        if _WORDS.fullmatch(gold) or not (_DECIMAL.fullmatch(gold) or parsed(gold, self.timeout)):
            return (
                f'the column "{self.column}" holds {gold!r}, which cannot be parsed; mend the row'
            )
        return None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        if reason := self.unfit(sample.prompt):
            return Score.failed(reason)
        answer = found(sample.reply, self.tag)
        said = parsed(answer, self.timeout) if answer else []
        gold = parsed(answers.wanted(sample.prompt, self.column) or "", self.timeout)
        right = bool(said) and _library().verify(gold, said, timeout_seconds=self.timeout)
        return Score(float(right), {"answered": float(bool(said))}, answer or "no answer")


@functools.lru_cache(maxsize=1024)
def parsed(answer: str, timeout: int) -> list[Any]:
    """Of LaTeX what sympy can reckon with; [] where it cannot. Never by Python's eval."""
    if len(answer) > _LONGEST:
        return []
    library = _library()
    inner = answers.boxed(answer)
    return library.parse(
        rf"\boxed{{{answer if inner is None else inner}}}",
        [library.LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=timeout,
    )


def found(reply: str, tag: str) -> str | None:
    """The answer that the reply gives."""
    inside = answers.tagged(reply, tag)
    box = answers.boxed(reply if inside is None else inside)
    return inside if box is None else box


def _library() -> Any:
    try:
        import math_verify
    except ImportError as error:
        raise UserError('the reward "math" needs math-verify: pip install "gesso[math]"') from error
    return math_verify

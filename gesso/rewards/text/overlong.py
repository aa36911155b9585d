"""Overlong: DAPO's penalty for responses close to the length limit.

value = −min(max(n − (limit − buffer), 0), buffer)/buffer with n the length of the response: 0 up
to limit − buffer, −1 from the limit on (Yu et al. 2025, with 20480 and 4096 tokens); range [−1, 0].
The sampler counts the tokens, including the end token; words are separated by whitespace. Detail:
"length". No dependencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from gesso.config import Strict
from gesso.formulas import text as formulas
from gesso.types import Prompt, Sample, Score


class Overlong(Strict):
    """Length penalty of DAPO (Yu et al. 2025): −min(max(n − (limit − buffer), 0), buffer) / buffer.
    Range [−1, 0]."""

    limit: int = Field(ge=1)
    """Length at which the penalty reaches −1."""
    buffer: int = Field(ge=1)
    """Length over which the penalty grows from 0 to −1."""
    unit: Literal["tokens", "words", "characters"] = "tokens"
    """"tokens", "words" or "characters"."""

    @model_validator(mode="after")
    def _fits(self) -> Overlong:
        if self.buffer > self.limit:
            raise ValueError(f"buffer = {self.buffer} must not exceed limit = {self.limit}")
        return self

    def unfit(self, prompt: Prompt) -> str | None:
        return None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        response = sample.response
        length = len(response.split()) if self.unit == "words" else len(response)
        if self.unit == "tokens":
            if sample.tokens is None:
                return Score.failed(
                    'the number of tokens is unknown; use unit = "words" or "characters"'
                )
            length = sample.tokens
        value = formulas.overlong(length, self.limit, self.buffer)
        return Score(value, {"length": float(length)}, f"{length} {self.unit}")

"""The judge `judge`, with a custom question and scale, and the parsers of ratings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import model_validator

from gesso.rewards.base import Scorer
from gesso.rewards.edits import no_source
from gesso.rewards.judges.chat import (
    FIRST_TOKEN,
    MAX_TEXT_KEPT,
    ChatJudge,
    ChatScorer,
    Unanswered,
    first_token,
)
from gesso.rewards.judges.templates import DIGIT, EDITS, END, TEMPLATES
from gesso.types import Prompt, Sample, Score

MIN_DIGITS = 0.5  # probability


class Judge(ChatJudge):
    """A question to a served model: one of the bundled ones (`template`), or a file of your own
    (`prompt`), from whose answer `pattern` extracts the score. The value is score / highest; a
    score outside [lowest, highest] fails."""

    template: str = ""
    """Bundled question: "alignment" (does the image show what the prompt says), "aesthetics",
    "text" (is the text in it right and legible); of edits "edit" (does it follow the instruction)
    or "rest" (is everything else unchanged). The judge rates from 1 to 5 and ends with "Final
    Score: n"."""
    logits: bool = False
    """Uses the expected score, Σ p(n) · n over the whole numbers n of the scale, from the
    probabilities of the first token (Edit-R1, Li et al. 2025), instead of a written score. The
    question must ask for one digit. Requires a server with `logprobs`."""

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
        if not self.template:
            return super().wording
        return f"{TEMPLATES.get(self.template)} {DIGIT if self.logits else END}"

    def unfit(self, prompt: Prompt) -> str | None:
        edits = no_source(prompt) if self.template in EDITS else None
        return edits or super().unfit(prompt)

    def scorer(self) -> Scorer:
        return LogitsScorer(self) if self.logits else ChatScorer(self)

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
        if self.logits and (self.lowest < 0 or self.highest > 9):
            raise ValueError("logits requires a scale of single digits, within 0 to 9")
        return self

    def read(self, response: str, sample: Sample) -> Score:
        return parse_rating(response, self.pattern, self.lowest, self.highest)


class LogitsScorer(ChatScorer):
    """Reads the score from the probabilities of the first token."""

    OPTIONS: ClassVar[Mapping[str, Any]] = FIRST_TOKEN

    def __init__(self, judge: Judge) -> None:
        super().__init__(judge)
        self.scale = judge.lowest, judge.highest

    async def _score(self, sample: Sample) -> Score:
        try:
            answer = await self.complete(self.judge.question(sample), [sample])
            tokens = first_token(answer)
        except Unanswered as error:
            return Score.failed(str(error))
        return expected_rating(tokens, *self.scale)


def expected_rating(tokens: Sequence[tuple[str, float]], lowest: float, highest: float) -> Score:
    """Σ p(n) · n / Σ p(n) / highest over the scale's digits n. The detail `digits` is Σ p(n), which
    must be at least MIN_DIGITS: otherwise the judge would have written something else."""
    numbers = [(int(token), p) for token, p in tokens if re.fullmatch("[0-9]", token)]
    on_scale = [(n, p) for n, p in numbers if lowest <= n <= highest]
    mass = sum(p for _, p in on_scale)
    if mass < MIN_DIGITS:
        likely = max(tokens, key=lambda each: each[1], default=("", 0.0))[0]
        return Score.failed(
            f"the first token is a score with probability {mass:.2f}, expected at least "
            f"{MIN_DIGITS}; the likeliest one is {likely!r}"
        )
    value = sum(n * p for n, p in on_scale) / mass / highest
    return Score(value, {"digits": mass}, f"{value * highest:.2f}")


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

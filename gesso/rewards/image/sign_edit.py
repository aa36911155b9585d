"""Sign edit: does the edited sign have the right colour and the right word? A rule for the bundled
editing task.

value = share of the colour (as `sign-colour`) × spelling of the word (as `ocr`, without detection);
range [0, 1]. An instruction changes one of the two, and the other must stay: the columns `colour`
and `target` describe the whole result. Without them the instruction says what changes, and the
input image what stays. Requires the extra `ocr`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from gesso.config import Strict
from gesso.rewards.edits import source
from gesso.rewards.image.ocr import Ocr, spelling_score, target_of
from gesso.rewards.image.sign_colour import (
    NAMES,
    colour_score,
    colour_shares,
    most_frequent,
    target_colour,
)
from gesso.types import Prompt, Sample, Score


class SignEdit(Strict):
    """`sign-colour` times `ocr`, for the columns `colour` and `target`, a word: those of the edited
    sign. Without them: of the instruction, and what it leaves unchanged, of the input image. For
    the bundled editing model. Range [0, 1]. Requires the extra `ocr`. `sign-edit/exact`: both are
    right. `sign-edit/colour`, `sign-edit/word`: each alone."""

    def unfit(self, prompt: Prompt) -> str | None:
        word, colour = target_of(prompt), colour_of(prompt)
        known = colour in NAMES if colour is not None else bool(word and prompt.images)
        if known and (word or prompt.images):
            return None
        return (
            'expected the columns "target", a word, and "colour", one of '
            f"{', '.join(NAMES)}: those of the edited sign; or an input image, and one of them in "
            "the instruction"
        )

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        if problem := self.unfit(sample.prompt):
            return Score.failed(problem)
        colour = colour_of(sample.prompt) or most_frequent(colour_shares(source(sample)))
        text = target_of(sample.prompt) or self._word_of(sample)
        if not text:
            return Score.failed("no text can be read in the input image")
        prompt = replace(sample.prompt, columns={**sample.prompt.columns, "target": text})
        spelling = spelling_score(self._reader.read(sample.pixels), prompt)
        shares = colour_score(sample.pixels, colour)
        assert spelling.value is not None and shares.value is not None
        details = {"colour": shares.parts["right"], "word": spelling.parts["exact"]}
        details["exact"] = details["colour"] * details["word"]
        return Score(shares.value * spelling.value, details, f"{shares.text}: {spelling.text}")

    def _word_of(self, sample: Sample) -> str:
        return self._reader.read(source(sample)).strip()

    @cached_property
    def _reader(self) -> Ocr:
        return Ocr(detect=False)


def colour_of(prompt: Prompt) -> str | None:
    """The column `colour` if the row has one, else the colour in the instruction."""
    if prompt.columns.get("colour") is not None:
        return str(prompt.columns["colour"])
    return target_colour(prompt)

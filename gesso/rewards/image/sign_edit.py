"""Sign edit: does the edited sign have the right colour and the right word? A rule for the bundled
editing task.

value = share of the colour (as `sign-colour`) × spelling of the word (as `ocr`, without detection);
range [0, 1]. An instruction changes one of the two, and the other must stay: the columns `colour`
and `target` describe the whole result. Requires the extra `ocr`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from gesso.config import Strict
from gesso.rewards.image.ocr import Ocr, spelling_score
from gesso.rewards.image.sign_colour import NAMES, colour_score
from gesso.types import Prompt, Sample, Score


class SignEdit(Strict):
    """`sign-colour` times `ocr`, for the columns `colour` and `target` of the row: the colour and
    the word of the edited sign. For the bundled editing model. Range [0, 1]. Requires the extra
    `ocr`. `sign-edit/exact`: both are right. `sign-edit/colour`, `sign-edit/word`: each alone."""

    def unfit(self, prompt: Prompt) -> str | None:
        if prompt.columns.get("target") and prompt.columns.get("colour") in NAMES:
            return None
        return (
            'expected the columns "target", a word, and "colour", one of '
            f"{', '.join(NAMES)}: those of the edited sign"
        )

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        if problem := self.unfit(sample.prompt):
            return Score.failed(problem)
        word = spelling_score(self._reader.read(sample.pixels), sample.prompt)
        colour = colour_score(sample.pixels, str(sample.prompt.columns["colour"]))
        assert word.value is not None and colour.value is not None
        details = {"colour": colour.parts["right"], "word": word.parts["exact"]}
        details["exact"] = details["colour"] * details["word"]
        return Score(colour.value * word.value, details, f"{colour.text}: {word.text}")

    @cached_property
    def _reader(self) -> Ocr:
        return Ocr(detect=False)

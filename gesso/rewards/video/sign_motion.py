"""Sign motion: is the word readable in every frame, and does it move as the prompt says? A rule for
the bundled video task.

value = spelling of the word in its worst frame (as `ocr`, without detection) × motion in the
direction (as `motion`); range [0, 1]. A product: a readable sign that stands still, or a blur that
moves, is worth nothing. Requires the extra `ocr`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from gesso.config import Strict
from gesso.rewards.each import score_each
from gesso.rewards.image.ocr import NO_TARGET, Ocr, spelling_score, target_of
from gesso.rewards.video.motion import DIRECTIONS, Motion
from gesso.rewards.video.neighbours import video
from gesso.types import Prompt, Sample, Score

MOVING = 0.5  # least value of `motion` that counts as the right motion
_SLIDES = re.compile(rf"\bslides ({'|'.join(DIRECTIONS)})\b")


class SignMotion(Strict):
    """`ocr` of the worst frame times `motion`, for the columns `target`, a word, and `direction`,
    one of left, right, up and down. Without them, as in the prompt: a quoted word and "slides
    left". For the bundled video model. Range [0, 1]. Requires the extra `ocr`. `sign-motion/exact`:
    both are right. `sign-motion/word`: every frame is read as the word. `sign-motion/direction`: at
    least half of the full motion, in the direction."""

    of_videos: ClassVar[bool] = True
    only_videos: ClassVar[bool] = True

    def unfit(self, prompt: Prompt) -> str | None:
        if target_of(prompt) is None:
            return NO_TARGET
        if direction_of(prompt) in DIRECTIONS:
            return None
        return (
            f'expected a column "direction", one of {", ".join(DIRECTIONS)}, or "slides left" in '
            "the prompt"
        )

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_each(samples, self._score)

    def _score(self, sample: Sample) -> Score:
        if problem := self.unfit(sample.prompt):
            return Score.failed(problem)
        frames = video(sample)
        words = [spelling_score(self._reader.read(frame), sample.prompt) for frame in frames]
        spelling, motion = min(value_of(each) for each in words), value_of(self._motion(sample))
        details = {
            "word": min(each.parts["exact"] for each in words),
            "direction": float(motion >= MOVING),
        }
        details["exact"] = details["word"] * details["direction"]
        texts = dict.fromkeys(each.text for each in words)
        return Score(spelling * motion, details, " / ".join(texts))

    def _motion(self, sample: Sample) -> Score:
        columns = {**sample.prompt.columns, "direction": direction_of(sample.prompt)}
        prompt = replace(sample.prompt, columns=columns)
        return Motion().score([replace(sample, prompt=prompt)])[0]

    @cached_property
    def _reader(self) -> Ocr:
        return Ocr(detect=False)


def direction_of(prompt: Prompt) -> object:
    """The column `direction` if the row has one, else the direction in which the sign slides."""
    if prompt.columns.get("direction") is not None:
        return prompt.columns["direction"]
    found = _SLIDES.search(prompt.text)
    return found and found[1]


def value_of(score: Score) -> float:
    assert score.value is not None
    return score.value

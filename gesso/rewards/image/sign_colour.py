"""Sign colour: is the sign as red as the prompt says? A rule for the bundled task.

Every pixel is named after the nearest, in RGB, of the eight colours that the bundled signs have.
The most frequent is the colour seen; black and white, where they are not that, are letters and do
not count. value = the share of the asked colour among the pixels that count; range [0, 1]. Details:
"right" (it is the colour seen) and "share" (of all pixels). A prompt must say `red sign`, or
another of the eight. Needs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from gesso.config import Strict
from gesso.types import Prompt, Sample, Score
from gesso.zoo.words import PAINT

NAMES = tuple(PAINT)
_PALETTE = np.array([PAINT[name][0] for name in NAMES], dtype=np.int64)  # (8, 3)
_LETTERS = ("black", "white")
_ASKED = re.compile(rf"\b({'|'.join(NAMES)}) sign\b", re.IGNORECASE)


class SignColour(Strict):
    def unfit(self, prompt: Prompt) -> str | None:
        if asked_of(prompt):
            return None
        return f"no sign with a colour is asked for; expected {', '.join(NAMES)} before sign"

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        asked = asked_of(sample.prompt)
        if asked is None:
            return Score.failed(self.unfit(sample.prompt) or "")
        shares = shares_of(sample.picture)
        seen = max(shares, key=shares.__getitem__)
        board = {name: s for name, s in shares.items() if name == seen or name not in _LETTERS}
        value = board.get(asked, 0.0) / sum(board.values())
        details = {"right": float(seen == asked), "share": shares[asked]}
        return Score(value, details, seen)


def asked_of(prompt: Prompt) -> str | None:
    """What stands in quotes is to be written, not a colour."""
    found = _ASKED.search(re.sub(r'"[^"]*"', "", prompt.text))
    return found.group(1).lower() if found else None


def shares_of(picture: np.ndarray) -> dict[str, float]:
    """Colour → share of the pixels nearest to it."""
    pixels: np.ndarray = picture.reshape(-1, 1, 3).astype(np.int64)
    nearest = ((pixels - _PALETTE) ** 2).sum(-1).argmin(1)  # (height · width,)
    counts = np.bincount(nearest, minlength=len(NAMES)) / len(nearest)
    return dict(zip(NAMES, counts.tolist(), strict=True))

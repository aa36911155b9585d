"""Scores images of signs with the OCR reward that was used to tune the bundled model.

The word fills the image, so the recogniser runs without a detector.
"""

from typing import NamedTuple

import numpy as np

from gesso.formulas.text import exact, spelling
from gesso.rewards.image.ocr import Ocr


class Reading(NamedTuple):
    text: str
    reward: float
    exact: bool


def read(image: np.ndarray, target: str) -> Reading:
    """Recognises the text of one RGB uint8 image and scores it against `target`."""
    text = Ocr(detect=False).read(image)
    return Reading(text, spelling(text, target), exact(text, target))


def read_pair(pair: tuple[np.ndarray, str]) -> Reading:
    """`read` for Pool.map."""
    return read(*pair)

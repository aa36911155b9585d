"""Reads signs with OCR and scores them: the yardstick the bundled model was tuned by.

The picture is as wide as the word, so the recogniser of RapidOCR reads it without a detector.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np


class Reading(NamedTuple):
    text: str  # spaces stripped, lower case
    reward: float
    exact: bool


@cache
def _reader() -> Any:
    from rapidocr import RapidOCR

    return RapidOCR(
        params={
            "Global.use_cls": False,
            "Global.use_det": False,
            "Global.log_level": "error",
            "Rec.rec_img_shape": [3, 48, 144],
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )


def read(picture: np.ndarray, target: str) -> Reading:
    """Reads one RGB uint8 picture and scores it against `target`."""
    found = _reader()(np.ascontiguousarray(picture[..., ::-1])).txts or ()
    text = "".join("".join(found).split()).lower()
    return Reading(text, reward(text, target.lower()), text == target.lower())


def read_pair(pair: tuple[np.ndarray, str]) -> Reading:
    """`read` for Pool.map."""
    return read(*pair)


def reward(text: str, target: str) -> float:
    """1 if `target` occurs in `text`, else 1 - min(edit distance, n) / n, n = len(target)."""
    if target in text:
        return 1.0
    return 1 - min(edit_distance(text, target), len(target)) / len(target)


def edit_distance(left: str, right: str) -> int:
    """Levenshtein distance, one row of the table at a time."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(right, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]

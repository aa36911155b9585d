"""OCR: does the image contain the text that the prompt quotes?

value = Flow-GRPO's spelling score in [0, 1]: 1 if the recognised text contains the target, else
1 − min(edit distance, length)/length. Details: "exact" (the recognised text equals the target) and
"longer" (it is longer than the target: repeating the target exploits the substring rule). Uses
RapidOCR with the PP-OCR weights in its wheel. Requires the extra `ocr`.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np

from gesso.config import Strict
from gesso.formulas import text as formulas
from gesso.types import Prompt, Sample, Score, UserError

_QUOTED = re.compile(r'"([^"]+)"')
NO_TARGET = 'expected a double-quoted text in the prompt, or a column "target"'


class Ocr(Strict):
    """1 if the recognised text contains the quoted word of the prompt, otherwise 1 − min(edit
    distance, length) / length; spaces and case are ignored (Flow-GRPO). Range [0, 1]. Requires the
    extra `ocr`. `ocr/exact`: the recognised text equals the word. `ocr/longer`: more text than
    requested was recognised."""

    detect: bool = True
    """False: treat the whole image as one line of text and skip detection."""

    def unfit(self, prompt: Prompt) -> str | None:
        return None if target_of(prompt) else NO_TARGET

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self.compare(self.read(sample.pixels), sample.prompt) for sample in samples]

    def compare(self, text: str, prompt: Prompt) -> Score:
        return spelling_score(text, prompt)

    def read(self, image: np.ndarray) -> str:
        """All text in an RGB image, in reading order, lines joined by spaces, with full-width
        letters as plain ones."""
        height, width = image.shape[:2]
        strip = min(320, -(-48 * width // height)) if not self.detect else 320
        result = _engine(self.detect, strip)(np.ascontiguousarray(image[:, :, ::-1]))
        return unicodedata.normalize("NFKC", " ".join(result.txts or ()))


def spelling_score(text: str, prompt: Prompt) -> Score:
    """Compares the text recognised in an image with the target text of its prompt."""
    target = target_of(prompt)
    if target is None:
        return Score.failed(NO_TARGET)
    details = {
        "exact": float(formulas.exact(text, target)),
        "longer": float(len(formulas.normalised(text)) > len(formulas.normalised(target))),
    }
    return Score(formulas.spelling(text, target), details, text)


def target_of(prompt: Prompt) -> str | None:
    """The column `target` if the row has one, else the first double-quoted span."""
    if prompt.columns.get("target") is not None:
        return str(prompt.columns["target"]).strip() or None
    quoted = _QUOTED.search(prompt.text)
    return quoted.group(1) if quoted and quoted.group(1).strip() else None


@functools.lru_cache(maxsize=4)
def _engine(detect: bool, strip: int) -> Any:
    """One thread: workers run in parallel. `strip` is the recogniser's input width; the default of
    320 takes twice the time that a narrow sign needs."""
    try:
        from rapidocr import RapidOCR
    except ImportError as error:
        raise UserError('reward "ocr" requires RapidOCR: pip install "gesso[ocr]"') from error
    return RapidOCR(
        params={
            "Global.use_cls": False,
            "Global.use_det": detect,
            "Global.log_level": "error",
            "Det.limit_side_len": 64,
            "Det.limit_type": "min",
            "Rec.rec_img_shape": [3, 48, strip],
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )

"""JPEG compressibility: −KB/500 of the picture at quality 95 (KB = 1,000 bytes). Range (−∞, 0)."""

from __future__ import annotations

import io
from collections.abc import Sequence

from gesso.config import Strict
from gesso.types import Prompt, Sample, Score


class JpegCompressibility(Strict):
    def unfit(self, prompt: Prompt) -> str | None:
        return None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [Score(-_kilobytes(sample) / 500) for sample in samples]


def _kilobytes(sample: Sample) -> float:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(sample.image).save(buffer, format="JPEG", quality=95)
    return buffer.tell() / 1000

"""JPEG size at quality 95, in units of 500 KB (KB = 1,000 bytes). No dependencies.

Compressibility: −KB/500, range (−∞, 0), as in Flow-GRPO. Incompressibility: its negative, KB/500,
range (0, ∞); Flow-GRPO does not divide the latter. Introduced by DDPO (Black et al. 2023).
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from gesso.config import Strict
from gesso.types import Prompt, Sample, Score


class JpegCompressibility(Strict):
    """−kilobytes / 500 as JPEG at quality 95 (Black et al. 2023)."""

    def unfit(self, prompt: Prompt) -> str | None:
        return None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [Score(-_kilobytes(sample) / 500) for sample in samples]


class JpegIncompressibility(Strict):
    """Kilobytes / 500 as JPEG at quality 95 (Black et al. 2023)."""

    def unfit(self, prompt: Prompt) -> str | None:
        return None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [Score(_kilobytes(sample) / 500) for sample in samples]


def _kilobytes(sample: Sample) -> float:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(sample.pixels).save(buffer, format="JPEG", quality=95)
    return buffer.tell() / 1000

"""Custom rewards, for docs/custom-reward.md: a function, and a class with state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from gesso.types import Prompt, Sample, Score


def contrast(samples: Sequence[Sample], best: float = 80.0) -> list[float]:
    """Standard deviation of the brightness, divided by `best`; at most 1."""
    return [min(1.0, float(s.pixels.mean(2).std()) / best) for s in samples]


class LikeReference:
    """Similarity of the colours to those of a reference image; 1 for identical colours."""

    def __init__(self, path: str, bins: int = 4) -> None:
        self.bins = bins
        self.reference = self.shares(np.asarray(Image.open(path).convert("RGB")))  # read once

    def unfit(self, prompt: Prompt) -> str | None:
        """Called once for every prompt, before the run."""
        return None if "sign" in prompt.text else "is not about a sign"

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self.one(sample.pixels) for sample in samples]

    def one(self, image: np.ndarray) -> Score:
        if image.std() == 0:
            return Score.failed("the image is blank")  # a failure, not an invented value
        common = np.minimum(self.shares(image), self.reference)
        return Score(float(common.sum()), {"colours": float((common > 0).sum())})

    def shares(self, image: np.ndarray) -> np.ndarray:
        """Share of the pixels in each cell of colour space."""
        cells: np.ndarray = image.reshape(-1, 3).astype(int) * self.bins // 256  # (pixels, 3)
        index = cells @ [self.bins**2, self.bins, 1]
        return np.bincount(index, minlength=self.bins**3) / len(index)

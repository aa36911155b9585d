"""Rewards of your own, for docs/custom-reward.md: a function, and a class with state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from gesso.types import Prompt, Sample, Score


def contrast(samples: Sequence[Sample], best: float = 80.0) -> list[float]:
    """Spread of the brightness; `best` and above is worth 1."""
    return [min(1.0, float(s.pixels.mean(2).std()) / best) for s in samples]


class LikeReference:
    """How near the colours are to those of a picture, which is read once. 1 is the same."""

    def __init__(self, path: str, bins: int = 4) -> None:
        self.bins = bins
        self.wanted = self.shares(np.asarray(Image.open(path).convert("RGB")))

    def unfit(self, prompt: Prompt) -> str | None:
        """Asked once for every prompt, before the run."""
        return None if "sign" in prompt.text else "is not about a sign"

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self.one(sample.pixels) for sample in samples]

    def one(self, picture: np.ndarray) -> Score:
        if picture.std() == 0:
            return Score.failed("the picture is blank")  # never a made-up number
        common = np.minimum(self.shares(picture), self.wanted)
        return Score(float(common.sum()), {"colours": float((common > 0).sum())})

    def shares(self, picture: np.ndarray) -> np.ndarray:
        """Share of the pixels in each cell of colour space."""
        cells: np.ndarray = picture.reshape(-1, 3).astype(int) * self.bins // 256  # (pixels, 3)
        index = cells @ [self.bins**2, self.bins, 1]
        return np.bincount(index, minlength=self.bins**3) / len(index)

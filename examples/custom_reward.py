"""Custom rewards for docs/how-to/write-a-reward.md: a function, one that compares the samples of a
prompt, and a class with state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image
from torch import Tensor

from gesso.types import Prompt, Sample, Score, groupwise


def contrast(samples: Sequence[Sample], best: float = 80.0) -> list[float]:
    """Standard deviation of the brightness; `best` and above score 1."""
    return [min(1.0, float(s.pixels.mean(2).std()) / best) for s in samples]


@groupwise
def brightest(samples: Sequence[Sample]) -> list[float]:
    """1 for the brightest sample of each prompt, 0 for the others."""
    means = [float(s.pixels.mean()) for s in samples]
    return [float(mean == max(means)) for mean in means]


class LikeReference:
    """Overlap of the colour histograms of a sample and a reference image, in [0, 1]."""

    def __init__(self, path: str, bins: int = 4) -> None:
        self.bins = bins
        self.reference = self.histogram(np.asarray(Image.open(path).convert("RGB")))

    def unfit(self, prompt: Prompt) -> str | None:
        """Called once per prompt, before the run."""
        return None if "sign" in prompt.text else "is not about a sign"

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [self.score_one(sample.pixels) for sample in samples]

    def score_one(self, image: np.ndarray) -> Score:
        if image.std() == 0:
            return Score.failed("the image is blank")  # a failure, not a made-up number
        overlap = np.minimum(self.histogram(image), self.reference)
        return Score(float(overlap.sum()), {"colours": float((overlap > 0).sum())})

    def histogram(self, image: np.ndarray) -> np.ndarray:
        """Fraction of the pixels in each cell of the colour space."""
        cells: np.ndarray = image.reshape(-1, 3).astype(int) * self.bins // 256  # (pixels, 3)
        index = cells @ [self.bins**2, self.bins, 1]
        return np.bincount(index, minlength=self.bins**3) / len(index)


class Bright:
    """Mean brightness, in [0, 1]."""

    differentiable = True

    def score(self, samples: Sequence[Sample]) -> list[float]:
        return [float(s.pixels.mean()) / 255 for s in samples]

    def values(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        return images.mean((1, 2, 3))

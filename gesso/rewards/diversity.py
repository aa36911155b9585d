"""Diversity of the samples of a prompt, against models that draw the same image for every seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gesso.config import Strict
from gesso.formulas.comparisons import mean_distances, mean_word_distances
from gesso.types import Prompt, Sample, Score

GRID = 16  # cells of an image per side


class Diversity(Strict):
    """Groupwise: the mean distance of a sample to the others of its prompt, in [0, 1]. Images are
    averaged over 16 × 16 cells, in RGB from 0 to 1; the distance of two is the root mean square
    of their differences. For texts it is 1 − |common words| / |all words|. No model is used."""

    def unfit(self, prompt: Prompt) -> str | None:
        return None

    def score_group(self, samples: Sequence[Sample]) -> list[Score]:
        if len(samples) < 2:
            return [Score.failed("expected at least 2 samples of the prompt, got 1")]
        if all(sample.text is not None for sample in samples):
            values = mean_word_distances([sample.response for sample in samples])
        else:
            values = mean_distances(np.stack([_cells(s.pixels) for s in samples])).tolist()
        return [Score(value) for value in values]


def _cells(image: np.ndarray) -> np.ndarray:
    """(768,) float64: the mean colours of the cells. Pillow's box filter weights pixels that belong
    to several cells, and rounds to 1/255."""
    from PIL import Image

    small = Image.fromarray(image).resize((GRID, GRID), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float64).ravel() / 255

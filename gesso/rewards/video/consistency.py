"""Temporal consistency: does a frame look like the one before?

pixels     value = 1 − mean |difference| of neighbouring frames, of channels in [0, 1]; as in UniRL
network    value = mean cosine of the patch features of neighbouring frames, at least 0
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gesso.config import Strict
from gesso.rewards.each import score_each
from gesso.rewards.image.unchanged import load_patches
from gesso.rewards.video.neighbours import differences, video
from gesso.types import Prompt, Sample, Score, UserError

if TYPE_CHECKING:
    from torch import Tensor


class TemporalConsistency(Strict):
    """How much neighbouring frames of a video resemble each other. Range [0, 1].
    `temporal-consistency/pixels`: 1 − mean absolute difference, also the value without a `path`.
    `temporal-consistency/features`: with a `path`, the mean cosine of patch features, which is the
    value. A still video has 1: combine it with `motion`. Without a `path` it is differentiable."""

    of_videos: ClassVar[bool] = True
    only_videos: ClassVar[bool] = True
    differentiable: ClassVar[bool] = True

    path: str = ""
    """Folder or hub name of a CLIP or DINOv2 network; "" compares pixels only."""
    device: str = "auto"
    """Device of the network; "auto" selects CUDA when available."""

    def unfit(self, prompt: Prompt) -> str | None:
        return None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_each(samples, self._score)

    def _score(self, sample: Sample) -> Score:
        frames = video(sample)
        parts = {"pixels": 1 - float(differences(frames).mean())}
        if self.path:
            network = load_patches(self.path, self.device)
            cosines = [network.similarity(a, b).mean() for a, b in pairwise(frames)]
            parts["features"] = max(0.0, float(np.mean(cosines)))
        return Score(parts.get("features", parts["pixels"]), parts)

    def values(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """(N, 3, F, height, width) in [0, 1] → (N,)."""
        if self.path:
            raise UserError('temporal-consistency has a gradient only of pixels; set path = ""')
        return 1 - images.diff(dim=2).abs().mean((1, 2, 3, 4))

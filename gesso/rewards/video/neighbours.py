"""What rewards of videos compare: each frame with the next."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from gesso.types import Sample, UserError


def video(sample: Sample) -> np.ndarray:
    """(F, height, width, 3) uint8, F ≥ 2."""
    if len(sample.frames) < 2:
        raise UserError("this sample has one frame; expected a video of at least 2")
    return sample.frames


def differences(frames: np.ndarray) -> np.ndarray:
    """(F − 1,): the mean |difference| of each frame to the next, of channels in [0, 1]."""
    pairs = pairwise(frames)  # one pair at a time: a video may be large
    return np.array([np.abs(b.astype(np.float32) - a).mean() / 255 for a, b in pairs])

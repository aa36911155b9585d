"""Motion: how much, and where to, do the contents of a video move?

flow         Optical flow of tiles. In each pair of neighbouring frames, the displacement of a tile
             is the peak of its phase correlation (Kuglin and Hines 1975), to a fraction of a pixel
             by a parabola. The flow of the video is the mean over tiles and pairs, weighted by the
             contrast of the tile: a plain background says nothing about motion. Flicker and noise
             have no peak, and count as no motion.
difference   Mean |difference| of neighbouring frames, which flicker raises as well as motion.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from gesso.config import Strict
from gesso.rewards.each import score_each
from gesso.rewards.video.neighbours import differences, video
from gesso.types import Prompt, Sample, Score

LARGEST = 256  # px: longer frames are downscaled by an integer factor
TILE = 64  # px, or the shorter side of the frame
MIN_PEAK = 0.15  # of the correlation, 1 for an exact shift; noise has less
MIN_CONTRAST = 2.0  # standard deviation of grey values in [0, 255]
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


class Motion(Strict):
    """How much a video moves: min(1, amount / full). With a row's column `direction` ("left",
    "right", "up", "down") only motion that way counts; with "still" the value is 1 minus that.
    `motion/pixels`: mean displacement per frame; `motion/dx`, `motion/dy`: the mean vector;
    `motion/difference`: mean difference of neighbouring frames, in [0, 1]."""

    of_videos: ClassVar[bool] = True
    only_videos: ClassVar[bool] = True

    by: Literal["flow", "difference"] = "flow"
    """What the amount is: "flow", the displacement per frame as a share of the frame's longer side,
    or "difference", the mean |difference| of channels in [0, 1], which has no direction."""
    full: float = Field(0.02, gt=0)
    """Amount at which the value is 1."""

    def unfit(self, prompt: Prompt) -> str | None:
        known = (*DIRECTIONS, "still") if self.by == "flow" else ("still",)
        direction = prompt.columns.get("direction")
        if direction is None or direction in known:
            return None
        return f'column "direction" is {direction!r:.40}; expected one of {", ".join(known)}'

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_each(samples, self._score)

    def _score(self, sample: Sample) -> Score:
        frames = video(sample)
        difference = float(differences(frames).mean())
        length, (dx, dy) = displacement(frames)
        parts = {"pixels": length, "dx": dx, "dy": dy, "difference": difference}
        direction = sample.prompt.columns.get("direction")
        amount = difference
        if self.by == "flow":
            x, y = DIRECTIONS.get(str(direction), (0, 0))
            along = max(0.0, x * dx + y * dy) if direction in DIRECTIONS else length
            amount = along / max(frames.shape[1:3])
        value = min(1.0, amount / self.full)
        return Score(1 - value if direction == "still" else value, parts)


def displacement(frames: np.ndarray) -> tuple[float, tuple[float, float]]:
    """Mean length of the displacement of tiles, in pixels per frame, and the mean (x, y)."""
    factor = -(-max(frames.shape[1:3]) // LARGEST)
    grey = [_grey(frame, factor) for frame in frames]
    pairs = [_flow(a, b) for a, b in pairwise(grey)]
    flow = factor * np.concatenate([vectors for vectors, _ in pairs])  # (tiles, 2)
    weight = np.concatenate([weights for _, weights in pairs])  # (tiles,)
    if weight.sum() == 0:
        return 0.0, (0.0, 0.0)
    dx, dy = np.average(flow, axis=0, weights=weight)
    return float(np.average(np.hypot(*flow.T), weights=weight)), (float(dx), float(dy))


def _grey(frame: np.ndarray, factor: int) -> np.ndarray:
    """(height / factor, width / factor): means of squares of pixels."""
    height, width = (length // factor * factor for length in frame.shape[:2])
    grey = frame[:height, :width].mean(-1, dtype=np.float32)
    return grey.reshape(height // factor, factor, width // factor, factor).mean((1, 3))


def _flow(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The displacement (x, y) of each tile, and its contrast, 0 for a plain one."""
    a, b = _tiles(one), _tiles(other)  # (tiles, side, side)
    contrast = np.maximum(a.std((1, 2)), b.std((1, 2)))
    weights = np.where(contrast >= MIN_CONTRAST, contrast, 0.0)
    vectors = np.zeros((len(a), 2))
    textured = np.flatnonzero(weights)
    for i, surface in zip(textured, _correlation(a[textured], b[textured]), strict=True):
        vectors[i] = _peak(surface)
    return vectors, weights


def _tiles(grey: np.ndarray) -> np.ndarray:
    """(tiles, side, side): squares side by side, the last ones aligned to the right and below."""
    side = min(TILE, *grey.shape)
    tops, lefts = ({*range(0, n - side + 1, side), n - side} for n in grey.shape)
    corners = [(top, left) for top in sorted(tops) for left in sorted(lefts)]
    return np.stack([grey[top : top + side, left : left + side] for top, left in corners])


def _correlation(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """(tiles, side, side): the phase correlation, with its peak at the displacement."""
    side = one.shape[-1]
    window = np.hanning(side + 2)[1:-1]
    centred = (each - each.mean((1, 2), keepdims=True) for each in (one, other))
    a, b = (np.fft.rfft2(each * window * window[:, None]) for each in centred)
    cross = np.conj(a) * b
    size = np.abs(cross)
    floor = 1e-6 * size.max((1, 2), keepdims=True) + 1e-12  # frequencies without content
    return np.fft.irfft2(cross / np.maximum(size, floor), (side, side))


def _peak(surface: np.ndarray) -> tuple[float, float]:
    """(x, y) of the peak; (0, 0) without a clear one."""
    y, x = divmod(int(surface.argmax()), surface.shape[1])
    if surface[y, x] < MIN_PEAK:
        return 0.0, 0.0
    return _fraction(surface[y], x), _fraction(surface[:, x], y)


def _fraction(line: np.ndarray, at: int) -> float:
    """The peak of the parabola through it and its neighbours, as a signed shift."""
    size = len(line)
    before, peak, after = line[at - 1], line[at], line[(at + 1) % size]
    curve = before - 2 * peak + after
    signed = at if at <= size // 2 else at - size
    return float(signed + (0.5 * (before - after) / curve if curve else 0.0))

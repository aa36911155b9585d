"""First frame: does a video begin with the image that it was given?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from gesso.rewards.image.unchanged import Unchanged
from gesso.types import Sample, Score


class FirstFrame(Unchanged):
    """How far the first frame of a video is the prompt's image (image to video), measured as in
    `unchanged`. Range [0, 1]. `first-frame/pixels`: exp(−mean absolute difference / scale), also
    the value without a `path`. `first-frame/features`: with a `path`, the mean cosine of patch
    features, which is the value."""

    of_videos: ClassVar[bool] = True
    only_videos: ClassVar[bool] = True

    kept: float = Field(1.0, gt=0, le=1)
    """Share of the image that should be as given."""

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return super().score([replace(s, image=s.frames[0], fps=None) for s in samples])

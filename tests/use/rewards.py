"""Rewards whose answers are known beforehand."""

from __future__ import annotations

from collections.abc import Sequence

from gesso.types import Sample, Score


def length(samples: Sequence[Sample]) -> list[float]:
    """Letters of the prompt."""
    return [float(len(sample.prompt.text)) for sample in samples]


def brightness(samples: Sequence[Sample]) -> list[Score]:
    """Of the picture; oaks cannot be scored."""
    return [
        Score.failed("no oaks")
        if sample.prompt.text == "oak"
        else Score(float(sample.pixels.mean()) / 255)
        for sample in samples
    ]

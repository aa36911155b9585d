"""A custom reward: red signs should be red, and all other signs should not."""

from __future__ import annotations

from collections.abc import Sequence

from gesso.types import Sample


def redness(samples: Sequence[Sample], margin: int = 120) -> list[float]:
    """Fraction of the pixels that match the prompt: red, or anything but red.

    A pixel is red if R exceeds both G and B by `margin`, which the recipe sets.
    """
    scores = []
    for sample in samples:
        red, green, blue = sample.pixels.astype(int).transpose(2, 0, 1)  # (height, width) each
        share = float(((red > green + margin) & (red > blue + margin)).mean())
        scores.append(share if "red" in sample.prompt.text.split() else 1 - share)
    return scores

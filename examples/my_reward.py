"""A reward of your own: is a sign that shall be red red, and every other sign not?"""

from __future__ import annotations

from collections.abc import Sequence

from gesso.types import Sample


def redness(samples: Sequence[Sample], margin: int = 120) -> list[float]:
    """Share of the pixels that are as the prompt asks: red, or anything but red.

    `margin` comes from the recipe: red is where R is above both G and B by so much.
    """
    scores = []
    for sample in samples:
        red, green, blue = sample.pixels.astype(int).transpose(2, 0, 1)  # (height, width) each
        share = float(((red > green + margin) & (red > blue + margin)).mean())
        scores.append(share if "red" in sample.prompt.text.split() else 1 - share)
    return scores

"""Aspect ratios of input images, and batches of prompts of one ratio (`model.match_input`).

The tensors of a batch have one shape, so all its samples have one size. Ratios are rounded to a
few, so that each has many prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gesso.data.prompts import Stream, WeightedPrompts, turns
from gesso.data.rows import weight_of
from gesso.types import Prompt

_WIDE = [(1, 1), (5, 4), (4, 3), (3, 2), (16, 9), (2, 1), (3, 1)]


@dataclass(frozen=True, order=True)
class Ratio:
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}:{self.height}"

    def size(self, area: int, multiple: int) -> tuple[int, int]:
        """Height and width of about this area, in multiples."""
        scale = math.sqrt(area / (self.width * self.height)) / multiple
        height, width = (max(1, round(side * scale)) for side in (self.height, self.width))
        return height * multiple, width * multiple


LONGEST = Ratio(*_WIDE[-1])
RATIOS = sorted({Ratio(*sides) for wide in _WIDE for sides in (wide, wide[::-1])})


def nearest(height: int, width: int) -> Ratio:
    return min(RATIOS, key=lambda r: abs(math.log(width * r.height / (height * r.width))))


def too_long(height: int, width: int) -> bool:
    """Whether no ratio is near, so that the output differs much from its input image."""
    return max(height, width) / min(height, width) > 1.1 * LONGEST.width / LONGEST.height


def ratio_of(prompt: Prompt) -> Ratio | None:
    """The aspect ratio of the first input image; None without one."""
    return nearest(*prompt.images[0].size) if prompt.images else None


class RatioStream(Stream):
    """Every batch has prompts of one ratio. Ratios alternate by their share of the prompts, in the
    same order for every seed; the batches of a ratio are a stream of their own."""

    def __init__(self, parts: Sequence[WeightedPrompts], seed: int) -> None:
        super().__init__(parts, seed)
        ratios = {id(prompt): ratio_of(prompt) for part in parts for prompt in part.prompts}
        found = sorted(set(ratios.values()), key=str)
        self._streams = [
            Stream([p for p in (_of(part, r, ratios) for part in parts) if p.prompts], seed)
            for r in found
        ]
        shares = [sum(part.weight for part in stream.parts) for stream in self._streams]
        self._shares = shares

    def batch(self, i: int, size: int) -> list[Prompt]:
        ((ratio, k),) = turns(self._shares, i, 1)
        return self._streams[ratio].batch(k, size)

    def other(self, seed: int) -> Stream:
        return RatioStream(self.parts, seed)


def _of(
    part: WeightedPrompts, ratio: Ratio | None, ratios: dict[int, Ratio | None]
) -> WeightedPrompts:
    """The prompts of one ratio, with their share of the weight of the source."""
    own = [prompt for prompt in part.prompts if ratios[id(prompt)] == ratio]
    share = math.fsum(map(weight_of, own)) / math.fsum(map(weight_of, part.prompts))
    return WeightedPrompts(own, part.weight * share)

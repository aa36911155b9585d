"""Floating-point precision inside formulas."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

WEYL = -1640531535  # 2³²/φ as an int32


def wide(x: Tensor) -> Tensor:
    """At least float32: half precision is widened, float64 is unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def dither_thresholds(shape: Sequence[int], device: torch.device) -> Tensor:
    """int32 in [0, 2¹⁶): Weyl's sequence i·φ mod 1, in units of 2⁻¹⁶."""
    index = torch.arange(math.prod(shape), dtype=torch.int32, device=device).view(*shape)
    return index.mul_(WEYL).bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def dithered_(x: Tensor, thresholds: Tensor) -> Tensor:
    """Rounds a float32 matrix, or a batch of matrices, to bfloat16: the position of x between its
    two neighbours is compared with a fixed threshold per element to round up or down.
    Round-to-nearest drops updates smaller than half a ULP; dithering preserves them on average.
    Values that bfloat16 represents exactly are unchanged.

    In place: the result is a strided view of the memory of x, which must be contiguous. The upper
    half of a float32 is a bfloat16; the sum carries into it if x is to be rounded up."""
    upper = 1 if sys.byteorder == "little" else 0
    return x.view(torch.int32).add_(thresholds).view(torch.bfloat16)[..., upper::2]

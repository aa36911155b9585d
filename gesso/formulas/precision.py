"""Floating-point precision inside formulas."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """At least float32: half precision is widened, float64 is unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def dithered(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a float32 matrix x, or a batch of matrices, to `dtype`. For bfloat16, the position
    of x between its two neighbours is compared with a fixed threshold per element, from Weyl's
    sequence i·φ mod 1, to round up or down. Round-to-nearest drops updates smaller than half a ULP;
    dithering preserves them on average. Values that bfloat16 represents exactly are unchanged.
    Other dtypes use round-to-nearest."""
    if dtype != torch.bfloat16:
        return x.to(dtype)
    matrix = x.shape[-2:]
    index = torch.arange(matrix.numel(), dtype=torch.int32, device=x.device).view(matrix)
    threshold = index.mul_(-1640531535).bitwise_right_shift_(16).bitwise_and_(0xFFFF)  # 2³²/φ
    bits = x.contiguous().view(torch.int32) + threshold
    return bits.bitwise_and_(-0x10000).view(torch.float32).to(dtype)

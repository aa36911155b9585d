"""Floating-point precision inside formulas."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """float32 at least: half precision is widened, float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def dithered(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 matrix x, or a batch of them, in `dtype`. bfloat16 rounds up or down by comparing
    the position of x between its two neighbours with a fixed threshold of each element, from Weyl's
    sequence i·φ mod 1. Round-to-nearest drops updates smaller than half a ULP; dithering preserves
    them on average. Values that bfloat16 represents exactly are unchanged. Other types round to the
    nearest."""
    if dtype != torch.bfloat16:
        return x.to(dtype)
    matrix = x.shape[-2:]
    index = torch.arange(matrix.numel(), dtype=torch.int32, device=x.device).view(matrix)
    threshold = index.mul_(-1640531535).bitwise_right_shift_(16).bitwise_and_(0xFFFF)  # 2³²/φ
    bits = x.contiguous().view(torch.int32) + threshold
    return bits.bitwise_and_(-0x10000).view(torch.float32).to(dtype)

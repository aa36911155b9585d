"""How wide numbers are inside a formula."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """float32 at least: half precision is widened, float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def dithered(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix x (float32), or each of a batch, in `dtype`. For bfloat16, up or down in proportion
    to where x lies between the two: a threshold that each place has for good, of Weyl's sequence
    i·φ mod 1, decides. To the nearest, a change of less than half a unit would be lost wherever it
    is made; so it reaches its share of the places. What bfloat16 holds exactly stays as it is. The
    finer types round to the nearest."""
    if dtype != torch.bfloat16:
        return x.to(dtype)
    matrix = x.shape[-2:]
    places = torch.arange(matrix.numel(), dtype=torch.int32, device=x.device).view(matrix)
    threshold = places.mul_(-1640531535).bitwise_right_shift_(16).bitwise_and_(0xFFFF)  # 2³²/φ
    bits = x.contiguous().view(torch.int32) + threshold
    return bits.bitwise_and_(-0x10000).view(torch.float32).to(dtype)

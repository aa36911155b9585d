"""The gradient of `repeating.Repeats` in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 1024
"""Numbers of a copy that a program adds at a time."""


def summed(x: Tensor, copies: Tensor, starts: Tensor) -> Tensor:
    """(K, …), whose rows copies[starts[t]:starts[t + 1]] are added up, in float32 → (T, …)"""
    x, count = x.contiguous(), len(starts) - 1
    out = x.new_empty(count, *x.shape[1:])
    width = x[0].numel()
    columns = min(AT_ONCE, triton.next_power_of_2(width))
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _summed[(count, triton.cdiv(width, columns))](
            x, copies, starts, out, width, COLUMNS=columns, num_warps=max(1, columns // 256)
        )
    return out


@triton.jit
def _summed(x, copies, starts, out, width, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    first, last = tl.load(starts + token), tl.load(starts + token + 1)
    for i in tl.range(first, last):
        row = tl.load(copies + i)
        total += tl.load(x + row * width + column, inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), inside)

"""Folds an adapter into a weight in Triton, which reads the weight once and writes the result once.
With the operations of torch, eight times as many bytes pass through memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gesso.formulas.precision import WEYL

ROWS, COLUMNS = 64, 128
"""Of a tile."""
RANKS = 32
"""Ranks that are multiplied at once, which bounds shared memory for any rank."""


def folded(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + s·BA in bfloat16, dithered as by `formulas.precision.dithered_`. weight: (out, in)
    bfloat16, contiguous; a: (rank, in), b: (out, rank), float32."""
    result = weight.new_empty(weight.shape)
    a, b = a.contiguous(), b.contiguous()
    rows, columns = weight.shape
    grid = triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS)
    with torch.cuda.device_of(weight):  # Triton launches on the current device
        _folded[grid](
            weight, a, b, result, scale, rows, columns,
            RANK=len(a), RANKS=RANKS, WEYL=WEYL, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8,
        )  # fmt: skip
    return result


@triton.jit
def _folded(
    weight, a, b, result, scale, rows, columns,
    RANK: tl.constexpr, RANKS: tl.constexpr, WEYL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    change = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, RANK, RANKS):
        k = start + tl.arange(0, RANKS)
        b_tile = tl.load(b + row * RANK + k[None, :], (row < rows) & (k < RANK)[None, :], other=0.0)
        a_tile = tl.load(
            a + k[:, None] * columns + column, (k < RANK)[:, None] & (column < columns), other=0.0
        )
        change = tl.dot(b_tile, a_tile, change, input_precision="tf32x3")
    inside = (row < rows) & (column < columns)
    at = row.to(tl.int64) * columns + column
    value = tl.load(weight + at, inside, other=0.0).to(tl.float32) + scale * change
    threshold = (at.to(tl.int32) * WEYL >> 16) & 0xFFFF
    bits = (value.to(tl.int32, bitcast=True) + threshold) >> 16
    tl.store(result + at, bits.to(tl.int16).to(tl.bfloat16, bitcast=True), inside)

"""Folds an adapter into a weight in Triton, which reads the weight once and writes the result once.
With the operations of torch, eight times as many bytes pass through memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gesso.formulas.precision import WEYL

TILE = 64
"""Rows and half the columns of a tile."""


def folded(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + s·BA in bfloat16, dithered as by `formulas.precision.dithered_`. weight: (out, in)
    bfloat16, contiguous; a: (rank, in), b: (out, rank), float32."""
    result = weight.new_empty(weight.shape)
    a, b = a.contiguous(), b.contiguous()
    rows, columns = weight.shape
    grid = triton.cdiv(rows, TILE), triton.cdiv(columns, 2 * TILE)
    _folded[grid](
        weight, a, b, result, scale, rows, columns,
        RANK=len(a), PADDED=max(16, triton.next_power_of_2(len(a))), WEYL=WEYL,
        ROWS=TILE, COLUMNS=2 * TILE, num_warps=8,
    )  # fmt: skip
    return result


@triton.jit
def _folded(
    weight, a, b, result, scale, rows, columns,
    RANK: tl.constexpr, PADDED: tl.constexpr, WEYL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    rank = tl.arange(0, PADDED)
    ups = tl.load(b + row * RANK + rank[None, :], (row < rows) & (rank < RANK)[None, :], other=0.0)
    downs = tl.load(
        a + rank[:, None] * columns + column, (rank < RANK)[:, None] & (column < columns), other=0.0
    )
    inside = (row < rows) & (column < columns)
    at = row.to(tl.int64) * columns + column
    change = tl.dot(ups, downs, input_precision="tf32x3")
    value = tl.load(weight + at, inside, other=0.0).to(tl.float32) + scale * change
    threshold = (at.to(tl.int32) * WEYL >> 16) & 0xFFFF
    bits = (value.to(tl.int32, bitcast=True) + threshold) >> 16
    tl.store(result + at, bits.to(tl.int16).to(tl.bfloat16, bitcast=True), inside)

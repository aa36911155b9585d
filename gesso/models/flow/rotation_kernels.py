"""Rotary position embeddings in Triton. From the formula in torch, inductor generates a kernel that
computes both numbers of a pair for each of them and takes twice as long (H200)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32
"""Heads of tokens per program."""


def rotated(x: Tensor, rotation: Tensor, backward: bool) -> Tensor:
    """x (n, s, H, d), rotated by (s, d / 2, 2) or (n, s, d / 2, 2); backward: by the opposite
    angles, which is the gradient."""
    x, rotation = x.contiguous(), rotation.contiguous()
    out = x.new_empty(x.shape)
    heads, width = x.shape[2:]
    rows, tokens = x.numel() // width, rotation.numel() // width
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _rotated[(triton.cdiv(rows, ROWS),)](
            x, rotation, out, rows, heads, tokens, -1.0 if backward else 1.0,
            WIDTH=width, ROWS=ROWS, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _rotated(
    x, rotation, out, rows, heads, tokens, sign, WIDTH: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    at = row[:, None] * WIDTH + column
    inside = (row < rows)[:, None]
    angle = ((row // heads) % tokens)[:, None] * WIDTH + column
    pairs = tl.load(x + at, inside, other=0.0).to(tl.float32)
    a, b = tl.split(tl.reshape(pairs, (ROWS, WIDTH // 2, 2)))
    angles = tl.load(rotation + angle, inside, other=0.0).to(tl.float32)
    cos, sin = tl.split(tl.reshape(angles, (ROWS, WIDTH // 2, 2)))
    sin *= sign
    result = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (ROWS, WIDTH))
    tl.store(out + at, result.to(out.dtype.element_ty), inside)

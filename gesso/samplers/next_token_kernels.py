"""`next_token.sample_tokens` from raw logits, in Triton: reads them once and stores only sums of
blocks. With the operations of torch, the probabilities of all ids pass through memory several
times.

    n sequences · V ids · C blocks of ids
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS = 32
"""Blocks per program."""


def sample_from_raw(
    raw: Tensor, uniform: Tensor, temperature: float, allowed: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    """(n, V) logits, (n,) float64 in [0, 1), (V,) bool, ids per block → (n,) ids and their
    log-probs."""
    n, ids = raw.shape
    assert raw.is_contiguous() and allowed.is_contiguous() and uniform.is_contiguous()
    assert uniform.dtype == torch.float64
    count = triton.cdiv(ids, block)
    tops = raw.new_empty(n, count, dtype=torch.float32)
    sums = raw.new_empty(n, count, dtype=torch.float64)
    tokens = raw.new_empty(n, dtype=torch.long)
    logp = raw.new_empty(n, dtype=torch.float32)
    greedy = temperature == 0
    divisor = temperature or 1.0
    with torch.cuda.device_of(raw):  # Triton launches on the current device
        _sum_blocks[(n, triton.cdiv(count, BLOCKS))](
            raw, allowed.view(torch.uint8), tops, sums, divisor, ids, count,
            BLOCK=block, BLOCKS=BLOCKS, num_warps=4,
        )  # fmt: skip
        _choose[(n,)](
            raw, allowed.view(torch.uint8), uniform, tops, sums, tokens, logp, divisor, ids, count,
            BLOCK=block, COUNT=triton.next_power_of_2(count), GREEDY=greedy, num_warps=4,
        )  # fmt: skip
    return tokens, logp


@triton.jit
def _logits(raw, allowed, row, at, ids, divisor):
    """Tempered; −∞ for ids that are not allowed."""
    inside = at < ids
    value = tl.load(raw + row * ids + at, inside, other=0.0).to(tl.float32) / divisor
    return tl.where(inside & (tl.load(allowed + at, inside, other=0) != 0), value, float("-inf"))


@triton.jit
def _sum_blocks(
    raw, allowed, tops, sums, divisor, ids, count, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """The largest logit of each block, and Σ exp(logit − largest)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    logits = _logits(raw, allowed, row, at, ids, divisor)
    top = tl.max(logits, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(logits - base[:, None]).to(tl.float64), 1)
    tl.store(tops + row * count + block, top, block < count)
    tl.store(sums + row * count + block, total, block < count)


@triton.jit
def _first_above(shares, below, index):
    """The first index whose cumulated share is above `below`; if rounding leaves none, the last
    with a non-zero share."""
    cumulated = tl.cumsum(shares, 0)
    found = tl.sum((cumulated <= below).to(tl.int32), 0)
    return tl.minimum(found, tl.max(tl.where(shares > 0, index, 0), 0))


@triton.jit
def _choose(
    raw, allowed, uniform, tops, sums, tokens, logp, divisor, ids, count,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, COUNT)
    tops_here = tl.load(tops + row * count + blocks, blocks < count, other=float("-inf"))
    top = tl.max(tops_here, 0)
    shares = tl.exp(tops_here - top).to(tl.float64)
    shares *= tl.load(sums + row * count + blocks, blocks < count, other=0.0)
    total = tl.sum(shares, 0)
    within = tl.arange(0, BLOCK)
    if GREEDY:
        block = tl.argmax(tops_here, 0)
        logits = _logits(raw, allowed, row, block * BLOCK + within, ids, divisor)
        offset = tl.argmax(logits, 0)
    else:
        below = tl.load(uniform + row) * total
        block = _first_above(shares, below, blocks)
        below = tl.maximum(below - tl.sum(tl.where(blocks < block, shares, 0.0), 0), 0.0)
        logits = _logits(raw, allowed, row, block * BLOCK + within, ids, divisor)
        offset = _first_above(tl.exp(logits - top).to(tl.float64), below, within)
    chosen = tl.max(tl.where(within == offset, logits, float("-inf")), 0)
    token = tl.minimum(block * BLOCK + offset, ids - 1)  # a maximum of NaN may be anywhere
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logp + row, chosen - (top + tl.log(total).to(tl.float32)))

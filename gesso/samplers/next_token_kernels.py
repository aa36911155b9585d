"""`next_token.add_next_tokens` in Triton: reads the logits once and stores only sums of blocks; the
program that chooses the token of a slot also updates its state. With the operations of torch, the
probabilities of all ids pass through memory several times, and each update is a kernel.

    n sequences · V ids · C blocks of ids
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gesso.samplers.buffers import Buffers

BLOCKS = 32
"""Blocks per program."""


def add_next_tokens(
    raw: Tensor, temperature: float, allowed: Tensor, buffers: Buffers, block: int
) -> None:
    """As `next_token.add_next_tokens`, with `block` ids per block."""
    n, ids = raw.shape
    (slots, longest), ends = buffers.tokens.shape, len(buffers.end)
    state = (
        buffers.uniform, buffers.tokens, buffers.logp, buffers.count, buffers.limit, buffers.last,
        buffers.position, buffers.runs.view(torch.uint8), buffers.end, buffers.report,
    )  # fmt: skip
    assert n == slots
    assert all(t.is_contiguous() for t in (raw, allowed, *state))
    blocks = triton.cdiv(ids, block)
    tops = raw.new_empty(n, blocks, dtype=torch.float32)
    sums = raw.new_empty(n, blocks, dtype=torch.float64)
    given = raw, allowed.view(torch.uint8), tops, sums, temperature or 1.0, ids, blocks
    with torch.cuda.device_of(raw):  # Triton launches on the current device
        _sum_blocks[(n, triton.cdiv(blocks, BLOCKS))](
            *given, BLOCK=block, BLOCKS=BLOCKS, num_warps=4,
        )  # fmt: skip
        _add_tokens[(n,)](
            *given, *state, n, longest, ends, BLOCK=block,
            BLOCKS=triton.next_power_of_2(blocks), ENDS=triton.next_power_of_2(max(1, ends)),
            GREEDY=temperature == 0, num_warps=4,
        )  # fmt: skip


@triton.jit
def _logits(raw, allowed, row, at, ids, divisor):
    """Tempered; −∞ for ids that are not allowed."""
    inside = at < ids
    value = tl.load(raw + row * ids + at, inside, other=0.0).to(tl.float32) / divisor
    return tl.where(inside & (tl.load(allowed + at, inside, other=0) != 0), value, float("-inf"))


@triton.jit
def _sum_blocks(
    raw, allowed, tops, sums, divisor, ids, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """The largest logit of each block, and Σ exp(logit − largest)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    logits = _logits(raw, allowed, row, at, ids, divisor)
    top = tl.max(logits, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(logits - base[:, None]).to(tl.float64), 1)
    tl.store(tops + row * blocks + block, top, block < blocks)
    tl.store(sums + row * blocks + block, total, block < blocks)


@triton.jit
def _first_above(shares, below, index):
    """The first index whose cumulated share is above `below`; if rounding leaves none, the last
    with a non-zero share."""
    cumulated = tl.cumsum(shares, 0)
    found = tl.sum((cumulated <= below).to(tl.int32), 0)
    return tl.minimum(found, tl.max(tl.where(shares > 0, index, 0), 0))


@triton.jit
def _choose(
    raw, allowed, tops, sums, divisor, ids, blocks, row, uniform,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    """An id and its log-prob."""
    index = tl.arange(0, BLOCKS)
    tops_here = tl.load(tops + row * blocks + index, index < blocks, other=float("-inf"))
    top = tl.max(tops_here, 0)
    shares = tl.exp(tops_here - top).to(tl.float64)
    shares *= tl.load(sums + row * blocks + index, index < blocks, other=0.0)
    total = tl.sum(shares, 0)
    within = tl.arange(0, BLOCK)
    if GREEDY:
        block = tl.argmax(tops_here, 0)
        logits = _logits(raw, allowed, row, block * BLOCK + within, ids, divisor)
        offset = tl.argmax(logits, 0)
    else:
        below = uniform * total
        block = _first_above(shares, below, index)
        below = tl.maximum(below - tl.sum(tl.where(index < block, shares, 0.0), 0), 0.0)
        logits = _logits(raw, allowed, row, block * BLOCK + within, ids, divisor)
        offset = _first_above(tl.exp(logits - top).to(tl.float64), below, within)
    chosen = tl.max(tl.where(within == offset, logits, float("-inf")), 0)
    token = tl.minimum(block * BLOCK + offset, ids - 1)  # a maximum of NaN may be anywhere
    return token.to(tl.int64), chosen - (top + tl.log(total).to(tl.float32))


@triton.jit
def _add_tokens(
    raw, allowed, tops, sums, divisor, ids, blocks,
    uniform, tokens, logp, count, limit, last, position, runs, end, report, slots, longest, ends,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ENDS: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    """One program per slot, which alone reads and writes its state. Every warp loads all of it
    before the reductions of `_choose`, and it is stored after them: otherwise a warp could read
    what another one has already stored."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, ENDS)
    end_ids = tl.load(end + index, index < ends, other=-1)
    running = tl.load(runs + row) != 0
    length, most = tl.load(count + row), tl.load(limit + row)
    newest, place = tl.load(last + row), tl.load(position + row)
    at = row * longest + tl.minimum(length, longest - 1)
    token, token_logp = _choose(
        raw, allowed, tops, sums, divisor, ids, blocks, row, tl.load(uniform + at),
        BLOCK, BLOCKS, GREEDY,
    )  # fmt: skip
    tl.store(tokens + at, token, running)
    tl.store(logp + at, token_logp, running)
    newest = tl.where(running, token, newest)
    length += running
    tl.store(last + row, newest)
    tl.store(position + row, place + running)
    tl.store(count + row, length)
    ended = tl.max((end_ids == token).to(tl.int32), 0) != 0
    running = running & ~(ended | (length == most))
    tl.store(runs + row, running.to(tl.uint8))
    tl.store(report + row, tl.where(running, 0, length))
    tl.store(report + slots + row, newest)

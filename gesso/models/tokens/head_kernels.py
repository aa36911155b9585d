"""`head.scored` in Triton: reads the logits twice, writes the probabilities once, and is compiled
once for any number of positions.

    n positions · V ids
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 2048
"""Ids that are read at a time."""
STAGES = 3
"""Reads that are in flight."""
LOWEST = tl.constexpr(-1e30)  # finite: the difference of two −∞ is not a number


def scored(
    raw: Tensor, tokens: Tensor, temperature: float, allowed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(n, V) logits, (n,) ids, (V,) bool → log-probs and entropies (n,), and the probabilities
    (n, V) in the precision of the logits."""
    n, ids = raw.shape
    assert raw.is_contiguous() and tokens.is_contiguous() and allowed.is_contiguous()
    logp, entropy = raw.new_empty(2, n, dtype=torch.float32)
    shares = torch.empty_like(raw)
    with torch.cuda.device_of(raw):  # Triton launches on the current device
        _scored[(n,)](
            raw, tokens, allowed.view(torch.uint8), logp, entropy, shares, 1 / (temperature or 1.0),
            ids, AT_ONCE=AT_ONCE, STAGES=STAGES, num_warps=8,
        )  # fmt: skip
    return logp, entropy, shares


@triton.jit
def _logits(raw, allowed, at, ids, factor):
    """Logits times a factor, 0 for ids that are not allowed; and which are."""
    kept = tl.load(allowed + at, at < ids, other=0) != 0
    logits = tl.load(raw + at, at < ids, other=0.0).to(tl.float32) * factor
    return tl.where(kept, logits, 0.0), kept


@triton.jit
def _scored(
    raw, tokens, allowed, logp, entropy, shares, factor, ids,
    AT_ONCE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program per position. Every lane has its own running maximum, so that lanes need not wait
    for each other before the end."""
    row = tl.program_id(0).to(tl.int64)
    raw += row * ids
    shares += row * ids
    top = tl.full((AT_ONCE,), LOWEST, tl.float32)
    total = tl.zeros((AT_ONCE,), tl.float32)  # Σ exp(logit − top)
    weighted = tl.zeros((AT_ONCE,), tl.float32)  # Σ logit · exp(logit − top)
    for start in tl.range(0, ids, AT_ONCE, num_stages=STAGES):
        logits, kept = _logits(raw, allowed, start + tl.arange(0, AT_ONCE), ids, factor)
        value = tl.where(kept, logits, LOWEST)
        smaller = tl.exp(-tl.abs(value - top))  # of the two exponentials, the other is 1
        fade = tl.where(value > top, smaller, 1.0)
        share = tl.where(kept, tl.where(value > top, 1.0, smaller), 0.0)
        total = total * fade + share
        weighted = weighted * fade + share * logits
        top = tl.maximum(top, value)
    highest = tl.max(top, 0)
    fade = tl.exp(top - highest)
    total *= fade
    weighted *= fade
    norm = tl.sum(total, 0)
    logsumexp = highest + tl.log(norm)
    for start in tl.range(0, ids, AT_ONCE, num_stages=STAGES):
        at = start + tl.arange(0, AT_ONCE)
        logits, kept = _logits(raw, allowed, at, ids, factor)
        share = tl.where(kept, tl.exp(logits - logsumexp), 0.0)
        tl.store(shares + at, share.to(shares.dtype.element_ty), at < ids)
    token = tl.load(tokens + row)
    value = tl.load(raw + token).to(tl.float32) * factor
    value = tl.where(tl.load(allowed + token) != 0, value, float("-inf"))
    tl.store(logp + row, value - logsumexp)
    tl.store(entropy + row, logsumexp - tl.sum(weighted, 0) / norm)

"""`head.scored` in Triton: reads the logits twice and writes the probabilities once. The kernel
that inductor generates takes four times as long as these bytes (H200).

    n positions · V ids
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 4096
"""Ids that are read at a time."""


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
            raw, tokens, allowed.view(torch.uint8), logp, entropy, shares, temperature or 1.0, ids,
            AT_ONCE=AT_ONCE, num_warps=8,
        )  # fmt: skip
    return logp, entropy, shares


@triton.jit
def _logits(raw, allowed, at, ids, divisor):
    """Tempered logits, and which ids are allowed."""
    inside = at < ids
    kept = inside & (tl.load(allowed + at, inside, other=0) != 0)
    return tl.load(raw + at, inside, other=0.0).to(tl.float32) / divisor, kept


@triton.jit
def _scored(
    raw, tokens, allowed, logp, entropy, shares, divisor, ids, AT_ONCE: tl.constexpr
):  # fmt: skip
    """One program per position. A running maximum bounds the exponents, as in attention."""
    row = tl.program_id(0).to(tl.int64)
    raw += row * ids
    shares += row * ids
    top = -float("inf")
    total = tl.zeros((AT_ONCE,), tl.float32)
    weighted = tl.zeros((AT_ONCE,), tl.float32)  # Σ logit · exp(logit − top)
    for start in range(0, ids, AT_ONCE):
        logits, kept = _logits(raw, allowed, start + tl.arange(0, AT_ONCE), ids, divisor)
        higher = tl.maximum(top, tl.max(tl.where(kept, logits, float("-inf")), 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no id is allowed so far
        fade = tl.exp(top - base)
        share = tl.where(kept, tl.exp(logits - base), 0.0)
        total = total * fade + share
        weighted = weighted * fade + share * logits
        top = higher
    norm = tl.sum(total, 0)
    logsumexp = top + tl.log(norm)
    for start in range(0, ids, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        logits, kept = _logits(raw, allowed, at, ids, divisor)
        share = tl.where(kept, tl.exp(logits - logsumexp), 0.0)
        tl.store(shares + at, share.to(shares.dtype.element_ty), at < ids)
    token = tl.load(tokens + row)
    value = tl.load(raw + token).to(tl.float32) / divisor
    value = tl.where(tl.load(allowed + token) != 0, value, float("-inf"))
    tl.store(logp + row, value - logsumexp)
    tl.store(entropy + row, logsumexp - tl.sum(weighted, 0) / norm)

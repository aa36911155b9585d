"""Samples the next token of every sequence from its logits and a uniform number.

n sequences · V ids · C blocks of ids
"""

from __future__ import annotations

import torch
from torch import Tensor

from gesso.devices import HAS_TRITON
from gesso.models.tokens.head import tempered
from gesso.samplers.buffers import Buffers

BLOCK = 128
"""Ids per block: the search runs over blocks first, then within one."""


def sample_tokens(logits: Tensor, uniform: Tensor, greedy: bool) -> tuple[Tensor, Tensor]:
    """(n, V) float32 logits, (n,) float64 in [0, 1) → (n,) ids and their log-probs."""
    tokens = logits.argmax(-1) if greedy else inverse_cdf(logits, uniform)
    return tokens, logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def add_next_tokens(raw: Tensor, temperature: float, allowed: Tensor, buffers: Buffers) -> None:
    """Samples a token for every slot from the head's raw logits, (slots, V), and adds it to the
    slots that run: `Buffers.add_tokens`."""
    if raw.is_cuda and HAS_TRITON:
        from gesso.samplers import next_token_kernels

        next_token_kernels.add_next_tokens(raw, temperature, allowed, buffers, BLOCK)
    else:
        add_next_tokens_by_torch(raw, temperature, allowed, buffers)


def add_next_tokens_by_torch(
    raw: Tensor, temperature: float, allowed: Tensor, buffers: Buffers
) -> None:
    uniform = buffers.uniform.gather(1, buffers.next_column)[:, 0]
    logits = tempered(raw, temperature, allowed)
    buffers.add_tokens(*sample_tokens(logits, uniform, temperature == 0))


def inverse_cdf(logits: Tensor, uniform: Tensor) -> Tensor:
    """(n, V) logits, (n,) float64 in [0, 1) → (n,) ids: the first whose cumulative probability
    exceeds the uniform number. An id with probability 0 is never chosen. Sums are float64, and only
    block sums are cumulated over all ids: a scan over all 152,000 ids of a row is slow."""
    n, ids = logits.shape
    shares = (logits - logits.amax(-1, keepdim=True)).exp()
    shares = torch.nn.functional.pad(shares, (0, -ids % BLOCK)).view(n, -1, BLOCK)
    sums = shares.sum(-1, dtype=torch.float64)  # (n, C)
    cumulated = sums.cumsum(-1)
    below = uniform[:, None] * cumulated[:, -1:]
    block = _first_above(cumulated, below, sums)
    rest = (below - (cumulated.gather(1, block) - sums.gather(1, block))).clamp(min=0)
    inside = shares.gather(1, block[..., None].expand(n, 1, BLOCK))[:, 0].double()  # (n, BLOCK)
    offset = _first_above(inside.cumsum(-1), rest, inside)
    return (block * BLOCK + offset)[:, 0]


def _first_above(cumulated: Tensor, below: Tensor, shares: Tensor) -> Tensor:
    """(n, 1): the first index above `below`; if rounding leaves none, the last with a non-zero
    share."""
    index = torch.arange(shares.shape[1], device=shares.device)
    last = torch.where(shares > 0, index, 0).amax(-1, keepdim=True)
    return torch.minimum((cumulated <= below).sum(-1, keepdim=True), last)

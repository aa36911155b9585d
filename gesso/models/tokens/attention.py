"""Attention over sequences that lie one after another, through transformers' own extension point
for attention functions.

transformers' SDPA finds packed sequences by their positions and then masks a dense T × T product:
it pays for every pair of tokens of different samples. Here each sequence is attended to by itself,
so that packing costs what its sequences cost, and nothing can leak from one to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

NAME = "gesso"


def register() -> str:
    """Make it known to transformers; the name is what `attn_implementation` takes."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    return NAME


def attend(
    module: torch.nn.Module,
    query: Tensor,  # (n, heads, q, d)
    key: Tensor,  # (n, groups, k, d): a group of heads shares keys and values
    value: Tensor,
    attention_mask: Tensor | None,  # (n, 1, 1, k) bool
    scaling: float | None = None,
    segments: Sequence[Sequence[int]] | None = None,  # of each prompt: its length, its replies'
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each prompt, and of each reply over its prompt and itself; or,
    without segments, of one new token a row over what the mask leaves of its past. A prompt is
    passed once, however many replies it has."""
    if segments is None:
        return _one_token(query, key, value, attention_mask, scaling), None
    flat = [length for tree in segments for length in tree]
    parts = zip(*(t.split(flat, dim=2) for t in (query, key, value)), strict=True)
    out = []
    for tree in segments:
        q, k, v = next(parts)
        out.append(_causal(q, k, v, scaling))
        for _reply in tree[1:]:
            own_q, own_k, own_v = next(parts)
            joined = torch.cat([k, own_k], 2), torch.cat([v, own_v], 2)
            out.append(_causal(own_q, *joined, scaling))
    return torch.cat(out, dim=2).transpose(1, 2), None


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """The queries are the last of the keys' tokens."""
    new, past = query.shape[2], key.shape[2] - query.shape[2]
    mask = None
    if past and new > 1:
        mask = torch.ones(new, past + new, dtype=torch.bool, device=query.device).tril(past)
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=not past,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _one_token(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """The heads of a group are so many queries over the same keys, which need not be repeated."""
    n, heads, length, d = query.shape
    if mask is None or length != 1:
        raise ValueError(
            "a model that Gesso loaded was called directly; load the folder with transformers' "
            "Auto classes to use it outside of Gesso"
        )
    grouped = query.reshape(n, key.shape[1], -1, d)
    out = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=mask, scale=scaling
    )
    return out.reshape(n, 1, heads, d)

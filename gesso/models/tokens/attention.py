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
    segments: Sequence[int] | None = None,  # lengths of the packed sequences
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each segment of one row; or, without segments, of one new token a
    row over what the mask leaves of its past."""
    if segments is None:
        return _one_token(query, key, value, attention_mask, scaling), None
    parts = zip(*(t.split(list(segments), dim=2) for t in (query, key, value)), strict=True)
    out = [
        torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        for q, k, v in parts
    ]
    return torch.cat(out, dim=2).transpose(1, 2), None


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

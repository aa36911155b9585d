"""Aggregation of token losses to a scalar. mask: (N, S) bool, True on response tokens."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

Mode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]


def token_weights(mask: Tensor, mode: Mode, length: int | None = None) -> Tensor:
    """(N, S) float32 weights w, 0 outside the mask, such that the loss is Σ w·(token loss).
    With m the mask and len_i the number of tokens in row i:

    token-mean           m / Σm               equal weight per token (DAPO, arXiv 2503.14476)
    seq-mean-token-mean  m / (N·len_i)        equal weight per sequence (GRPO, 2402.03300)
    seq-mean-token-sum   m / N                weight proportional to the sequence length
    constant             m / (N·length)       the same, over a fixed length (Dr.GRPO, 2503.20783)

    Compute them once for the whole mini-batch and split them with it: a denominator per micro-batch
    or per rank, as in two reference codes, would make the gradient depend on the split. Ranks must
    *sum* their gradients; if gradients are averaged, multiply by the number of ranks.
    """
    if (mode == "constant") != (length is not None):
        raise ValueError(
            f"aggregation {mode!r} got length = {length}; "
            '"constant" requires a length and the other modes take none'
        )
    rows, tokens = len(mask), mask.sum(1, keepdim=True)  # (N, 1)
    weights = mask.float()
    if length is not None:
        return weights / (rows * length)
    if mode == "token-mean":
        return weights / tokens.sum()
    if mode == "seq-mean-token-mean":
        return weights / (rows * tokens)
    if mode == "seq-mean-token-sum":
        return weights / rows
    raise ValueError(f"unknown aggregation {mode!r}; use one of {', '.join(get_args(Mode))}")

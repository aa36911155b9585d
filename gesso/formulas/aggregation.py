"""From the losses of tokens to one number. mask: (N, S) bool, True on response tokens."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

Mode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]


def token_weights(mask: Tensor, mode: Mode, length: int | None = None) -> Tensor:
    """(N, S) float32 weights w, 0 outside the mask, such that the loss is Σ w·(loss of a token).
    With m the mask and len_i the tokens of row i:

    token-mean           m / Σm               every token counts the same (DAPO, arXiv 2503.14476)
    seq-mean-token-mean  m / (N·len_i)        every sequence counts the same (GRPO, 2402.03300)
    seq-mean-token-sum   m / N                a sequence counts by its length
    constant             m / (N·length)       the same, over a fixed length (Dr.GRPO, 2503.20783)

    Compute them once for the whole mini-batch and split them with it: a denominator per micro-batch
    or per rank, as in two references, would make the gradient depend on the split. Ranks must
    *sum* their gradients; where they are averaged, multiply by the number of ranks.
    """
    if (mode == "constant") != (length is not None):
        raise ValueError(
            f"aggregation {mode!r} got length = {length}; "
            'a length belongs to "constant", which needs one, and to no other'
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
    raise ValueError(f"no aggregation {mode!r}; there are {', '.join(get_args(Mode))}")

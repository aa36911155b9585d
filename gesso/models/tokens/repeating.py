"""Repeats the keys and values of a prompt for each of its responses.

The gradient of torch's indexing sorts the indices again in every layer, and checks them; here they
are sorted once per pass, and the copies of a token are added up in a fixed order.

    T tokens · K keys, each of them a copy of a token
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gesso.devices import HAS_TRITON


@dataclass(frozen=True)
class Repeats:
    tokens: Tensor  # (K,) token of each key
    copies: Tensor  # (K,) keys, ordered by their tokens
    starts: Tensor  # (T + 1,) of each token's copies in `copies`

    @staticmethod
    def of(tokens: Tensor, count: int) -> Repeats:
        """`count`: T"""
        ordered, copies = tokens.sort(stable=True)
        bounds = torch.arange(count + 1, device=tokens.device)
        return Repeats(tokens, copies, torch.searchsorted(ordered, bounds))

    def __call__(self, x: Tensor) -> Tensor:
        """(T, …) → (K, …)"""
        if x.is_cuda and not HAS_TRITON:
            return x[self.tokens]
        return _Repeated.apply(x, self.tokens, self.copies, self.starts)


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, copies: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(copies, starts)
        return x[tokens]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _summed(grad, *ctx.saved_tensors), None, None, None


@torch.library.custom_op("gesso::sum_copies", mutates_args=())
def _summed(x: Tensor, copies: Tensor, starts: Tensor) -> Tensor:
    """(K, …) → (T, …), added up in float32"""
    if x.is_cuda:
        from gesso.models.tokens import repeating_kernels

        return repeating_kernels.summed(x, copies, starts)
    total = x.new_zeros(len(starts) - 1, *x.shape[1:], dtype=torch.float32)
    token = torch.arange(len(total), device=x.device).repeat_interleave(starts.diff())
    return total.index_add_(0, token, x[copies].float()).to(x.dtype)


@_summed.register_fake
def _(x: Tensor, copies: Tensor, starts: Tensor) -> Tensor:
    return x.new_empty(starts.shape[0] - 1, *x.shape[1:])  # `len` would make it a constant

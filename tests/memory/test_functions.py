"""Functions that take the place of torch's while an estimate runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gesso.memory.functions import Autocast, Replaced, fused_attention
from gesso.memory.meta import peak


def test_a_function_is_replaced_in_the_backward_pass_too() -> None:
    """Where gradient checkpointing runs a layer again."""
    calls: list[torch.Size] = []

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        calls.append(query.shape)
        return fused_attention(query, key, value)

    x = torch.empty(2, 3, 8, 4, device="meta", requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x * 2, x, x).sin()

    with Replaced({functional.scaled_dot_product_attention: attention}):
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert calls == [x.shape] * 2 and x.grad is not None
    layer(x)
    assert len(calls) == 2  # only within


def test_no_attention_matrix_is_counted() -> None:
    x = torch.empty(1, 1, 1000, 4, device="meta")
    row_sums = x.nbytes // 4  # float32, for backward
    plain = peak([x], lambda: functional.scaled_dot_product_attention(x, x, x))
    assert plain == x.nbytes + row_sums
    mask = torch.empty(1, 1, 1000, 1000, device="meta", dtype=x.dtype)
    masked = peak([x, mask], lambda: functional.scaled_dot_product_attention(x, x, x, mask))
    assert masked == x.nbytes + row_sums


def test_autocast_rounds_a_weight_once_in_a_region() -> None:
    autocast = Autocast(torch.bfloat16)
    layer = nn.Linear(8, 8, bias=False, device="meta")
    x = torch.empty(2, 8, dtype=torch.bfloat16, device="meta")
    half = layer.weight.nbytes // 2

    @torch.no_grad()
    def twice() -> None:
        with Replaced({functional.linear: autocast.linear}), autocast.region():
            layer(x)
            with autocast.region():
                assert layer(x).dtype == torch.bfloat16
            layer(x)

    assert peak([x, layer.weight], twice) == half + x.nbytes
    assert not autocast._cast_weights

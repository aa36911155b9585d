"""Replacements for torch functions that the meta device lacks or implements differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gesso.models.flow.attention import attention

Function = Callable[..., Any]


class Replaced(TorchFunctionMode):
    """Replaces some of torch's functions, wherever they are called from."""

    def __init__(self, replacements: Mapping[Function, Function]) -> None:
        super().__init__()
        self.replacements = replacements

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.backward:
            assert not any(kwargs.values()), "a plain backward()"
            with self:
                return _backward(*args)
        return self.replacements.get(function, function)(*args, **kwargs)


def _backward(loss: Tensor) -> None:
    """`loss.backward()` through the autograd engine: torch disables function modes inside its own
    functions, and gradient checkpointing runs layers again in the backward pass."""
    engine = torch.autograd.Variable._execution_engine
    ones = torch.ones_like(loss)
    engine.run_backward(
        (loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """scaled_dot_product_attention as on real devices: no attention matrix is materialized. The
    operator has a name, by which compiled blocks know that its output is saved."""
    dtype = value.dtype
    bias = None if attn_mask is None else attn_mask.to(dtype)  # added to the scores
    return attention(query.to(dtype), key.to(dtype), value, bias)[0]


class Autocast:
    """torch.autocast for linear layers: a weight is cast once within `region`, and freed at its end
    or when the backward pass no longer needs it. `linear` replaces torch's."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._cast_weights: dict[int, Tensor] = {}  # by the id of the parameter
        self._in_region = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        half_bias = None if bias is None else self._cast(bias)
        return nn.functional.linear(self._cast(x), self._cast(weight), half_bias)

    def _cast(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        if not (self._in_region and isinstance(tensor, nn.Parameter)):
            return tensor.to(self.dtype)
        if id(tensor) not in self._cast_weights:
            self._cast_weights[id(tensor)] = tensor.to(self.dtype)
        return self._cast_weights[id(tensor)]

    @contextmanager
    def region(self) -> Iterator[None]:
        outermost = not self._in_region
        self._in_region = True
        try:
            yield
        finally:
            if outermost:
                self._in_region = False
                self._cast_weights.clear()

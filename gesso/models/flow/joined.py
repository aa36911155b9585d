"""Computes the query, key and value projections of an attention layer together.

The projections have the same input, and backward sums their gradients there: three GEMMs become
one, and the adapters read the input once for all three. The attention code of diffusers runs
unchanged and receives the precomputed projections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

from gesso.weights.folded_linear import FoldedLinear, apply_to_one_input

IMAGE = ("to_q", "to_k", "to_v")
TEXT = ("add_q_proj", "add_k_proj", "add_v_proj")
"""Diffusers' names for the projections of the two streams."""


def join_projections(network: nn.Module) -> None:
    """Applies to every attention layer in which all three projections of the image or of the text
    have foldable adapters. A layer whose `forward` was already replaced is unchanged."""
    for module in network.modules():
        untouched = "forward" not in vars(module)
        if untouched and any(_joinable(module, names) for names in (IMAGE, TEXT)):
            module.forward = MethodType(_joining(type(module).forward), module)


def _joinable(module: Any, names: Sequence[str]) -> bool:
    """Keys and values of Wan's cross-attention are projections of the text."""
    if getattr(module, "is_cross_attention", False):
        return False
    return all(isinstance(getattr(module, name, None), FoldedLinear) for name in names)


@cache  # one function for all attention layers of a class
def _joining(plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(attention: Any, hidden_states: Tensor, *more: Any, **named: Any) -> Any:
        projected = _Projected(attention)
        projected.compute(IMAGE, hidden_states)
        projected.compute(TEXT, more[0] if more else named.get("encoder_hidden_states"))
        return plain(projected, hidden_states, *more, **named)

    return forward


class _Projected:
    """An attention layer with precomputed projections."""

    def __init__(self, attention: Any) -> None:
        self.attention = attention

    def compute(self, names: Sequence[str], x: Tensor | None) -> None:
        if x is not None and _joinable(self.attention, names):
            layers = [getattr(self.attention, name) for name in names]
            for name, y in zip(names, apply_to_one_input(layers, x), strict=True):
                setattr(self, name, partial(_precomputed, x, y))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.attention, name)


def _precomputed(x: Tensor, y: Tensor, given: Tensor) -> Tensor:
    assert given is x, "the projection is applied to another tensor than the attention's input"
    return y

"""An attention's projections of one input, taken together.

Queries, keys and values are made of the same input, and on the way back their gradients meet there
again: three products whose results are added become one, and what adapters read of the input is
read for all three at once. The attention's own code, whichever it is, runs as ever, and finds them
done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

from gesso.weights.folded_linear import FoldedLinear, apply_to_one_input

PICTURE = ("to_q", "to_k", "to_v")
TEXT = ("add_q_proj", "add_k_proj", "add_v_proj")
"""As diffusers names the projections of its two streams."""


def join_projections(network: nn.Module) -> None:
    """In every attention where all three of the picture or of the text carry adapters that fold.
    One whose `forward` somebody has replaced stays as it is."""
    for module in network.modules():
        untouched = "forward" not in vars(module)
        if untouched and any(_joinable(module, names) for names in (PICTURE, TEXT)):
            module.forward = MethodType(_joining(type(module).forward), module)


def _joinable(module: Any, names: Sequence[str]) -> bool:
    return all(isinstance(getattr(module, name, None), FoldedLinear) for name in names)


@cache  # one function for all attentions of a class
def _joining(own: Callable[..., Any]) -> Callable[..., Any]:
    def forward(attention: Any, hidden_states: Tensor, *more: Any, **named: Any) -> Any:
        known = _Known(attention)
        known.learn(PICTURE, hidden_states)
        known.learn(TEXT, more[0] if more else named.get("encoder_hidden_states"))
        return own(known, hidden_states, *more, **named)

    return forward


class _Known:
    """An attention, and what its projections give."""

    def __init__(self, attention: Any) -> None:
        self.attention = attention

    def learn(self, names: Sequence[str], x: Tensor | None) -> None:
        if x is not None and _joinable(self.attention, names):
            found = apply_to_one_input([getattr(self.attention, name) for name in names], x)
            for name, y in zip(names, found, strict=True):
                setattr(self, name, partial(_given, x, y))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.attention, name)


def _given(x: Tensor, y: Tensor, asked: Tensor) -> Tensor:
    assert asked is x, "a projection of another input than its attention's"
    return y

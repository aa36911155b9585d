"""Gradients of the trained weights for each sample of a batch, in one backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

from gesso.weights.trainable import ADAPTER

if TYPE_CHECKING:
    from gesso.weights.folded_linear import FoldedLinear


@contextmanager
def per_sample_grads(
    layers: Mapping[str, FoldedLinear], trainable: Mapping[str, nn.Parameter], samples: int
) -> Iterator[dict[str, Tensor]]:
    """For passes over `samples` samples, each with one row or several adjacent rows. Yields the
    trained weights by name, expanded to (samples, …) without copying; backward writes the gradient
    of each sample to their `grad`."""
    expanded = {
        name: p.detach().expand(samples, *p.shape).requires_grad_() for name, p in trainable.items()
    }
    try:
        for name, layer in layers.items():
            a, b = (f"{name}.lora_{part}.{ADAPTER}.weight" for part in "AB")
            layer.per_sample_adapter = expanded[a], expanded[b]
        yield expanded
    finally:
        for layer in layers.values():
            layer.per_sample_adapter = None

"""Joining the traces of several sampling calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


def distinct_of(shared: Sequence[T], size: Callable[[T], int]) -> tuple[list[T], list[int]]:
    """The distinct objects that pieces share, and for each piece the offset of its object in their
    concatenation."""
    offsets: dict[int, int] = {}
    distinct: list[T] = []
    for item in shared:
        if id(item) not in offsets:
            offsets[id(item)] = sum(size(other) for other in distinct)
            distinct.append(item)
    return distinct, [offsets[id(item)] for item in shared]


def widened(pieces: Sequence[Tensor]) -> Tensor:
    """(n, s) tensors of different s → (Σ n, max s), zero-padded on the right."""
    import torch
    from torch.nn.functional import pad

    width = max(piece.shape[1] for piece in pieces)
    return torch.cat([pad(piece, (0, width - piece.shape[1])) for piece in pieces])

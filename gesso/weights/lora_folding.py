"""LoRA adapters folded into the weights while no weight changes.

During sampling, and between two optimizer steps, W + s·BA is one matrix per layer. Sampling and
training then use the same matrix, so the ratio stays 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gesso.types import Which
from gesso.weights.copies import NamedCopies

if TYPE_CHECKING:  # PEFT takes a second to import, and a full fine-tune does not need it
    from gesso.weights.folded_linear import FoldedLinear


class LoraFolding:
    """The folded matrices of a module's layers, and which of them the layers use."""

    def __init__(self, layers: Mapping[str, FoldedLinear], copies: NamedCopies) -> None:
        self.layers = dict(layers)
        self.enabled = bool(layers)
        self._copies = copies
        self._index = {layer: i for i, layer in enumerate(self.layers.values())}
        self._matrices: dict[Which, list[Tensor]] | None = None  # one per layer; None: not active
        self._pointed: Which | None = None  # weights whose matrices the layers point to

    @property
    def active(self) -> bool:
        return self._matrices is not None

    @property
    def matrices(self) -> Mapping[Which, Sequence[Tensor]]:
        """The matrices folded so far, by weights; empty outside of `folded`."""
        return self._matrices or {}

    @contextmanager
    def folded(self, soon: Which | None = None) -> Iterator[None]:
        """All weights, including copies, stay constant inside this context. Matrices, each as large
        as its weight, are folded when `using` first needs them; those of `soon` immediately, so
        that a GPU folds them while the host does other work. The weights themselves are never
        modified."""
        if not self.enabled or self.active:
            yield
            return
        self._matrices = {}
        try:
            if soon is not None and soon != "reference":
                self._fold(soon)
            yield
        finally:
            self._point(None)
            self._matrices = None

    @contextmanager
    def using(self, which: Which) -> Iterator[None]:
        """The layers run with the matrices of those weights."""
        before = self._pointed
        self._point(which)
        try:
            yield
        finally:
            # "current" stays: gradient checkpointing recomputes a pass after this block.
            if before is not None or which != "current":
                self._point(before)

    def join(self, layers: Sequence[nn.Module], dtype: torch.dtype) -> Tensor:
        """The matrices of layers that share an input as one (sum of outputs, inputs) tensor. Folded
        layers then point to views of it, so that their matrices are stored once. A layer without
        an adapter contributes its weight."""
        matrices = [self._matrix(layer).detach().to(dtype) for layer in layers]
        if len(matrices) == 1:  # needs no copy
            return matrices[0]
        joined = torch.cat(matrices)
        if self._matrices is not None and self._pointed in self._matrices:
            for layer, rows in zip(layers, joined.split([len(m) for m in matrices]), strict=True):
                if layer in self._index:
                    layer.folded = self._matrices[self._pointed][self._index[layer]] = rows
        return joined

    def _matrix(self, layer: nn.Module) -> Tensor:
        if layer not in self._index:
            assert type(layer) is nn.Linear, f"{type(layer).__name__} has an unfolded adapter"
            return layer.weight
        assert layer.folded is not None, "joined outside of `folded`"
        return layer.folded

    def _point(self, which: Which | None) -> None:
        """Points every layer to its matrix under those weights. None: the layer runs its frozen
        weight and a separate adapter, as in PEFT."""
        if which == self._pointed:
            return
        matrices: Sequence[Tensor | None] = [None] * len(self.layers)
        if which == "reference":
            matrices = [layer.frozen for layer in self.layers.values()]
        elif which is not None:
            matrices = self._fold(which)
        for layer, matrix in zip(self.layers.values(), matrices, strict=True):
            layer.folded = matrix
        self._pointed = which

    def _fold(self, which: Which) -> list[Tensor]:
        from gesso.weights.folded_linear import fold

        assert self._matrices is not None
        if which not in self._matrices:
            with self._copies.exchanged(which):
                self._matrices[which] = fold(list(self.layers.values()))
        return self._matrices[which]

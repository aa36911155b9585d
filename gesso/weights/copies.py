"""Named copies of the trained tensors: "old", "ema", and for a full fine-tune "reference".

A copy replaces the current weights inside a `with` block. Pointers are exchanged and no data is
copied, so the module, compiled or not, runs unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gesso.types import Weights, Which
from gesso.weights.shards import local


class NamedCopies:
    def __init__(self, trainable: Mapping[str, nn.Parameter]) -> None:
        self.trainable = trainable
        self.copies: dict[Which, dict[str, Tensor]] = {}

    def tensors(self, which: Which = "current") -> Weights:
        """The live tensors, not a copy of them."""
        if which == "current":
            return {name: p.data for name, p in self.trainable.items()}
        return self.copies[which]

    def snapshot(self, which: Which) -> None:
        """Creates or overwrites a copy of that name with the current weights."""
        self.copies[which] = {name: p.detach().clone() for name, p in self.trainable.items()}

    def load(self, weights: Weights, which: Which = "current") -> None:
        """Copies values in. Strict: a missing or extra name, or another shape, raises."""
        tensors = self.tensors(which)
        expected = {name: tensor.shape for name, tensor in tensors.items()}
        if differ := differences(expected, {name: t.shape for name, t in weights.items()}):
            raise ValueError(f"weights do not fit: {differ}")
        with torch.no_grad():
            for name, tensor in weights.items():
                if not same_memory(tensors[name], tensor):
                    tensors[name].copy_(tensor)

    @contextmanager
    def exchanged(self, which: Which) -> Iterator[None]:
        """The parameters point to the tensors of a copy; afterwards to the current ones again."""
        current = {name: p.data for name, p in self.trainable.items()}
        try:
            for name, tensor in self.tensors(which).items():
                self.trainable[name].data = tensor
            yield
        finally:
            for name, tensor in current.items():
                self.trainable[name].data = tensor


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, or the local parts of two sharded tensors, are the same memory."""
    return local(one).data_ptr() == local(other).data_ptr()


def differences(expected: Mapping[str, torch.Size], got: Mapping[str, torch.Size]) -> str:
    """Describes how the shapes of named tensors differ: the number of tensors and the first name of
    each kind of difference. Returns "" if they agree."""
    both = expected.keys() & got.keys()
    kinds = {
        "missing": expected.keys() - got.keys(),
        "unexpected": got.keys() - expected.keys(),
        "of a different shape": {name for name in both if expected[name] != got[name]},
    }
    words = []
    for kind, names in kinds.items():
        if names:
            first, be = min(names), "tensor is" if len(names) == 1 else "tensors are"
            words.append(f'{len(names)} {be} {kind}, first "{first}"')
            if first in both:
                words[-1] += f": expected {tuple(expected[first])}, got {tuple(got[first])}"
    return "; ".join(words)

"""The gradient of a mini-batch: a sum over its micro-batches, and over ranks.

A floating-point sum depends on the order of its terms, so one process and several ranks would end
with different last bits. `ExactSum` adds integers instead: each gradient is rounded to multiples of
2⁻⁷², and integers have the same sum in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from gesso.weights.shards import is_sharded

COARSE, FINE = 2.0**24, 2.0**72
"""A value is a multiple of 1/COARSE and a remainder, which is rounded to a multiple of 1/FINE.
Remainders are at most 2⁴⁷/FINE, so that 2¹⁶ of them fit into 64 bits."""
LARGEST = 2.0**32
"""Gradients beyond it count as not finite: their sum could overflow."""
AT_ONCE = 2**16
"""Values that are converted at once, in temporary tensors."""


class GradientSum(Protocol):
    def add(self) -> None:
        """Adds the parameters' gradients, to be called after every backward pass."""

    def buffers(self) -> Sequence[Tensor]:
        """The sums of this process, which several ranks add up in place before `write`."""

    def write(self) -> bool:
        """Sets the parameters' gradients to the sum. Returns whether it is known to be finite."""


class ExactSum:
    """Of float32 gradients; takes 16 bytes per parameter."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        device = parameters[0].device
        self._count = torch.zeros(len(parameters), dtype=torch.int64, device=device)
        self._not_finite = torch.zeros((), dtype=torch.int64, device=device)

    @cached_property
    def _sums(self) -> Tensor:
        """(2, values): coarse and fine. Not needed before the first backward pass has ended and
        freed its activations."""
        size = sum(p.numel() for p in self.parameters)
        return torch.zeros(2, size, dtype=torch.int64, device=self._count.device)

    @torch.no_grad()
    def add(self) -> None:
        present = [p.grad is not None for p in self.parameters]
        self._count += torch.tensor(present, device=self._count.device)
        all_coarse, all_fine = self._sums
        start = 0
        for values in self._taken():
            part = slice(start, start + len(values))
            start = part.stop
            self._not_finite += ~(values.abs().max() < LARGEST)
            coarse = (values * COARSE).round_()
            all_coarse[part] += coarse.long()
            all_fine[part] += values.sub_(coarse.div_(COARSE)).mul_(FINE).round_().long()

    def _taken(self) -> Iterator[Tensor]:
        """All gradients in order, in flat parts of about AT_ONCE values; each is then released.
        Small gradients are joined, as every operation has a fixed cost."""
        small: list[Tensor] = []
        for parameter in self.parameters:
            grad, parameter.grad = parameter.grad, None
            flat = (torch.zeros_like(parameter) if grad is None else grad).flatten()
            del grad
            if small and sum(map(len, small)) + len(flat) > AT_ONCE:
                yield torch.cat(small)
                small = []
            if len(flat) < AT_ONCE:
                small.append(flat)
            else:
                yield from flat.split(AT_ONCE)
        if small:
            yield torch.cat(small)

    def buffers(self) -> Sequence[Tensor]:
        return self._sums, self._count, self._not_finite

    @torch.no_grad()
    def write(self) -> bool:
        total = torch.empty_like(self._sums[0], dtype=torch.float32)
        parts = (each.split(AT_ONCE) for each in (total, *self._sums))
        for part, coarse, fine in zip(*parts, strict=True):
            part.copy_(coarse.double().div_(COARSE).add_(fine.double(), alpha=1 / FINE))
        grads = total.split([p.numel() for p in self.parameters])
        for parameter, grad, n in zip(self.parameters, grads, self._count.tolist(), strict=True):
            if n:
                parameter.grad = grad.view_as(parameter)
        return not self._not_finite


class FloatSum:
    """Added by autograd in the parameters' `grad`: takes no further memory."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self._count: Tensor | None = None  # ranks with a gradient of each parameter

    def add(self) -> None:
        """Autograd has added them."""

    @torch.no_grad()
    def buffers(self) -> Sequence[Tensor]:
        if not self.parameters:
            return []
        present = [float(p.grad is not None) for p in self.parameters]
        self._count = torch.tensor(present, device=self.parameters[0].device)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad
        return [self._count, *grads]

    def write(self) -> bool:
        """Parameters without a gradient on any rank have none."""
        if self._count is not None:
            for parameter, n in zip(self.parameters, self._count.tolist(), strict=True):
                parameter.grad = parameter.grad if n else None
        return True


def gradient_sum(parameters: Sequence[nn.Parameter]) -> GradientSum:
    """Exact on a CPU, where the passes themselves have the same bits in every process. Sharded
    parameters are left to FSDP, which adds up their gradients over ranks in every backward pass."""
    parameters = [p for p in parameters if not is_sharded(p)]
    exact = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in parameters)
    return ExactSum(parameters) if exact and parameters else FloatSum(parameters)

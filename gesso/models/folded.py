"""LoRA layers that can run with their adapter folded into the weight.

Beside the weight an adapter costs two thin products and an addition for every layer, a tenth of a
forward pass on a GPU. As long as no weight changes, W + s·BA is one matrix: while sampling, and
between two optimizer steps. Both then run with the very same matrix, so the ratio stays 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor
from torch.nn import functional as F

from gesso.formulas.precision import dithered

ADAPTER = "default"
TOGETHER = 2**26
"""Numbers of weights that are folded at once: half a gigabyte besides the result."""


class FoldedLinear(lora.Linear):
    """PEFT's layer for a linear one: the same but while `folded` is set."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.folded: Tensor | None = None  # (out, in)
        self.by_sample: tuple[Tensor, Tensor] | None = None  # (N, rank, in), (N, out, rank)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.folded is None:
            return super().forward(x, *args, **kwargs)
        return together([self], x)[0]

    @property
    def adapter(self) -> tuple[Tensor, Tensor]:
        return self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight

    @property
    def frozen(self) -> Tensor:
        return self.base_layer.weight.data


@torch.no_grad()
def fold(layers: Sequence[FoldedLinear]) -> list[Tensor]:
    """W + s·BA of each layer, in the weight's own precision. Layers of one shape go together: one
    by one, a large network's take longer to launch than to compute."""
    alike = defaultdict(list)
    for i, layer in enumerate(layers):
        alike[layer.frozen.shape, layer.frozen.dtype, layer.scaling[ADAPTER]].append(i)
    found: dict[int, Tensor] = {}
    for (shape, dtype, scale), places in alike.items():
        most = max(1, TOGETHER // shape.numel())
        for start in range(0, len(places), most):
            part = places[start : start + most]
            whole = torch.stack([layers[i].frozen for i in part]).float()
            a, b = map(torch.stack, zip(*(layers[i].adapter for i in part), strict=True))
            whole.baddbmm_(b, a, alpha=scale)
            apart = torch.unbind_copy(dithered(whole, dtype))  # a compiler looks at their storage
            found |= zip(part, apart, strict=True)
    return [found[i] for i in range(len(layers))]


def together(layers: Sequence[FoldedLinear], x: Tensor) -> Sequence[Tensor]:
    """What each of some layers gives for the same input."""
    if any(layer.folded is None for layer in layers):
        return [layer(x) for layer in layers]
    scales = [layer.scaling[ADAPTER] for layer in layers]
    weights = [layer.folded for layer in layers]
    biases = [layer.base_layer.bias for layer in layers]
    a, b = zip(*(layer.by_sample or layer.adapter for layer in layers), strict=True)
    return FoldedProducts.apply(x, scales, *weights, *biases, *a, *b)


class FoldedProducts(torch.autograd.Function):
    """y = xWᵀ + bias for W = W0 + s·BA, of one or several layers with the same input. Gradients
    reach x, A and B: with g = ∂L/∂y they are gW, s·(gB)ᵀx and s·gᵀ(xAᵀ), as if the adapter had been
    beside the weight; layers' gradients of x are added within one product. A and B may be given N
    times, the same numbers all over: then the gradient of each Nth of x's rows stays by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: Sequence[float], *tensors: Any) -> tuple[Tensor, ...]:
        n = len(scales)
        weights, biases, a, b = (tensors[i : i + n] for i in range(0, 4 * n, n))
        ctx.save_for_backward(x, *weights, *a, *b)
        ctx.scales = scales
        return tuple(F.linear(x, w, bias) for w, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        n = len(grads)
        weights, a, b = (saved[i : i + n] for i in range(0, 3 * n, n))
        # One layout for all products that read it, else a compiler copies it for each.
        inputs = x.reshape(-1, x.shape[-1])  # (M, in)
        grad = _joined([g.reshape(-1, g.shape[-1]) for g in grads], 1)  # (M, out of all)
        to_x = (grad @ _joined(weights, 0)).view(x.shape) if ctx.needs_input_grad[0] else None
        parts: tuple[int, ...] = (-1,)
        if a[0].ndim == 3:
            samples = len(a[0])
            assert len(x) % samples == 0, f"{len(x)} rows, adapters for {samples}"
            parts, a, b = (samples, -1), [t[0] for t in a], [t[0] for t in b]
        ranks = [len(t) for t in a]
        apart = grad.split([len(t) for t in b], 1)
        down = inputs @ _joined(a, 0).to(x.dtype).T  # (M, rank of all)
        up = _joined([g @ t.to(x.dtype) for g, t in zip(apart, b, strict=True)], 1)
        to_a = up.unflatten(0, parts).mT @ inputs.unflatten(0, parts)  # (…, rank of all, in)
        to_b = [
            g.unflatten(0, parts).mT @ d.unflatten(0, parts)
            for g, d in zip(apart, down.split(ranks, 1), strict=True)
        ]
        thin = zip([*to_a.split(ranks, -2), *to_b], [*ctx.scales, *ctx.scales], strict=True)
        return to_x, None, *[None] * (2 * n), *(t.to(a[0].dtype) * s for t, s in thin)


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)

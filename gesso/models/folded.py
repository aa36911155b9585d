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
        a, b = self.by_sample or self.adapter
        bias = self.base_layer.bias
        return FoldedProduct.apply(x, self.folded, bias, a, b, self.scaling[ADAPTER])

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
        together = max(1, TOGETHER // shape.numel())
        for start in range(0, len(places), together):
            part = places[start : start + together]
            whole = torch.stack([layers[i].frozen for i in part]).float()
            a, b = map(torch.stack, zip(*(layers[i].adapter for i in part), strict=True))
            whole.baddbmm_(b, a, alpha=scale)
            apart = torch.unbind_copy(dithered(whole, dtype))  # a compiler looks at their storage
            found |= zip(part, apart, strict=True)
    return [found[i] for i in range(len(layers))]


class FoldedProduct(torch.autograd.Function):
    """y = xWᵀ + bias for W = W0 + s·BA. Gradients reach x, A and B: with g = ∂L/∂y they are gW,
    s·(gB)ᵀx and s·gᵀ(xAᵀ), as if the adapter had been beside the weight. A and B may be given N
    times, the same numbers all over: then the gradient of each Nth of x's rows stays by itself."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        inputs, grads = (t.reshape(-1, t.shape[-1]) for t in (x, grad))  # (M, in), (M, out)
        to_x = (grads @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        parts: tuple[int, ...] = (-1,)
        if a.ndim == 3:
            assert len(x) % len(a) == 0, f"{len(x)} rows, adapters for {len(a)}"
            parts, a, b = (len(a), -1), a[0], b[0]
        down = (inputs @ a.to(x.dtype).T).unflatten(0, parts)  # (…, M, rank)
        up = (grads @ b.to(x.dtype)).unflatten(0, parts)  # (…, M, rank)
        to_a = (up.mT @ inputs.unflatten(0, parts)).to(a.dtype) * ctx.scale
        to_b = (grads.unflatten(0, parts).mT @ down).to(b.dtype) * ctx.scale
        return to_x, None, None, to_a, to_b, None

"""A LoRA layer that can run with its adapter folded into the weight.

A separate adapter costs two thin GEMMs and an addition per layer, a tenth of a forward pass on a
GPU. As long as no weight changes, W + s·BA can be stored as one matrix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gesso.devices import HAS_TRITON
from gesso.formulas.precision import dither_thresholds, dithered_
from gesso.weights.lora_linear import LoraLinear
from gesso.weights.trainable import ADAPTER

FOLD_AT_ONCE = 2**26
"""Weight values that are folded at once, in float32."""


class FoldedLinear(LoraLinear):
    """Has a separate adapter, unless `folded` is set. Only `LoraFolding` sets it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.folded: Tensor | None = None  # (out, in)
        # (N, rank, in), (N, out, rank); set within `per_sample_grads`
        self.per_sample_adapter: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.folded is None:
            return super().forward(x, *args, **kwargs)
        return apply_to_one_input([self], x)[0]

    @property
    def adapter(self) -> tuple[Tensor, Tensor]:
        return self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight

    @property
    def frozen(self) -> Tensor:
        return self.base_layer.weight.data


@torch.no_grad()
def fold(layers: Sequence[FoldedLinear]) -> list[Tensor]:
    """W + s·BA of each layer, in the precision of the weight."""
    if all(map(_has_kernel, layers)):
        from gesso.weights.folding_kernels import folded

        return [folded(layer.frozen, *layer.adapter, layer.scaling[ADAPTER]) for layer in layers]
    return fold_by_torch(layers)


def _has_kernel(layer: FoldedLinear) -> bool:
    weight = layer.frozen
    half = weight.is_cuda and weight.dtype == torch.bfloat16
    return half and weight.is_contiguous() and HAS_TRITON


def fold_by_torch(layers: Sequence[FoldedLinear]) -> list[Tensor]:
    """On any device, in any precision. Layers of the same shape are folded together: for single
    layers of a large network, kernel launches would take longer than the computation."""
    alike = defaultdict(list)
    for i, layer in enumerate(layers):
        alike[layer.frozen.shape, layer.frozen.dtype, layer.scaling[ADAPTER]].append(i)
    folded: dict[int, Tensor] = {}
    for (shape, dtype, scale), indices in alike.items():
        at_once = max(1, FOLD_AT_ONCE // shape.numel())
        device = layers[indices[0]].frozen.device
        thresholds = dither_thresholds(shape, device) if dtype == torch.bfloat16 else None
        for start in range(0, len(indices), at_once):
            part = indices[start : start + at_once]
            weights = torch.empty(len(part), *shape, dtype=torch.float32, device=device)
            for weight, i in zip(weights, part, strict=True):
                weight.copy_(layers[i].frozen)
            a, b = map(torch.stack, zip(*(layers[i].adapter for i in part), strict=True))
            weights.baddbmm_(b, a, alpha=scale)
            rounded = weights.to(dtype) if thresholds is None else dithered_(weights, thresholds)
            for i, matrix in zip(part, rounded, strict=True):
                # Each has a separate storage: compiled code is specialised to it.
                folded[i] = matrix.clone(memory_format=torch.contiguous_format)
    return [folded[i] for i in range(len(layers))]


def apply_to_one_input(layers: Sequence[FoldedLinear], x: Tensor) -> Sequence[Tensor]:
    """The output of each layer for the same input."""
    if any(layer.folded is None for layer in layers):
        return [layer(x) for layer in layers]
    scales = [layer.scaling[ADAPTER] for layer in layers]
    weights = [layer.folded for layer in layers]
    biases = [layer.base_layer.bias for layer in layers]
    a, b = zip(*(layer.per_sample_adapter or layer.adapter for layer in layers), strict=True)
    return FoldedLinearFunction.apply(x, scales, *weights, *biases, *a, *b)


class FoldedLinearFunction(torch.autograd.Function):
    """y = xWᵀ + bias for W = W0 + s·BA, of one or several layers with the same input. Gradients
    flow to x, A and B: with g = ∂L/∂y they are gW, s·(gB)ᵀx and s·gᵀ(xAᵀ), the same as for a
    separate adapter; the layers' gradients of x are summed within one GEMM. A and B may be
    expanded N times: then their gradients are separate for each of N equal parts of x's rows."""

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
        # One layout for all GEMMs that read it; otherwise the compiler copies it for each.
        inputs = x.reshape(-1, x.shape[-1])  # (M, in)
        grad = _cat([g.reshape(-1, g.shape[-1]) for g in grads], 1)  # (M, out of all)
        grad_x = (grad @ _cat(weights, 0)).view(x.shape) if ctx.needs_input_grad[0] else None
        rows: tuple[int, ...] = (-1,)  # or (N, -1)
        if a[0].ndim == 3:
            samples = len(a[0])
            assert len(x) % samples == 0, f"{len(x)} rows, adapters for {samples} samples"
            rows, a, b = (samples, -1), [t[0] for t in a], [t[0] for t in b]
        ranks = [len(t) for t in a]
        grads_by_layer = grad.split([len(t) for t in b], 1)
        down = inputs @ _cat(a, 0).to(x.dtype).T  # (M, rank of all)
        up = _cat([g @ t.to(x.dtype) for g, t in zip(grads_by_layer, b, strict=True)], 1)
        grad_a = up.unflatten(0, rows).mT @ inputs.unflatten(0, rows)  # (…, rank of all, in)
        grad_b = [
            g.unflatten(0, rows).mT @ d.unflatten(0, rows)
            for g, d in zip(grads_by_layer, down.split(ranks, 1), strict=True)
        ]
        scaled = zip([*grad_a.split(ranks, -2), *grad_b], [*ctx.scales, *ctx.scales], strict=True)
        return grad_x, None, *[None] * (2 * n), *(t.to(a[0].dtype) * s for t, s in scaled)


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)

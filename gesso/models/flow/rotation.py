"""Rotary position embeddings without complex numbers, for which inductor has no kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gesso.devices import HAS_TRITON


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """x (n, s, H, d), rotated by the complex numbers (s, d / 2, 2) or (n, s, d / 2, 2), given as
    pairs."""
    width = x.shape[-1]
    if x.is_cuda and HAS_TRITON and width & (width - 1) == 0:
        return torch.ops.gesso.rotate(x, rotation, False)
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotation.unsqueeze(-3).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(3).type_as(x)


@torch.library.custom_op("gesso::rotate", mutates_args=())
def _rotated(x: Tensor, rotation: Tensor, backward: bool) -> Tensor:
    from gesso.models.flow import rotation_kernels

    return rotation_kernels.rotated(x, rotation, backward)


@_rotated.register_fake
def _(x: Tensor, rotation: Tensor, backward: bool) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, rotation, ctx.backward = inputs
    ctx.save_for_backward(rotation)


def _grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (rotation,) = ctx.saved_tensors
    return _rotated(grad, rotation, not ctx.backward), None, None


_rotated.register_autograd(_grad, setup_context=_save)

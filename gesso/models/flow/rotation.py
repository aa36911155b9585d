"""Rotary position embeddings without complex numbers, for which inductor has no kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """x (n, s, H, d), rotated by the complex numbers (s, d / 2, 2) or (n, s, d / 2, 2), given as
    pairs."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotation.unsqueeze(-3).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(3).type_as(x)

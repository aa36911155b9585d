"""Latents of any rank: (N, C, H, W) of images, (N, C, F, H, W) of videos."""

from __future__ import annotations

from torch import Tensor


def column(value: Tensor, x: Tensor) -> Tensor:
    """(N,) → (N, 1, …), one value per row of x."""
    return value.view(-1, *(1 for _ in x.shape[1:]))

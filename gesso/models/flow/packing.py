"""Latents as tokens: FLUX and Qwen-Image pack 2×2 latent cells into one token of 4C values."""

from __future__ import annotations

from torch import Tensor


def pack(x: Tensor) -> Tensor:
    """(N, C, H, W) → (N, HW/4, 4C), row by row; within a token, channel first, then cell."""
    n, c, h, w = x.shape
    cells = x.reshape(n, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return cells.reshape(n, (h // 2) * (w // 2), 4 * c)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `pack`; height and width count latent cells."""
    n, _, channels = tokens.shape
    cells = tokens.reshape(n, height // 2, width // 2, channels // 4, 2, 2)
    return cells.permute(0, 3, 1, 4, 2, 5).reshape(n, channels // 4, height, width)

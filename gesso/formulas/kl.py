"""Distances between policies."""

from __future__ import annotations

from torch import Tensor


def gaussian_step(mean: Tensor, mean_ref: Tensor, s: Tensor) -> Tensor:
    """Flow-GRPO: mean over C,H,W of (μ − μ_ref)² / 2s², one value a step (N,).

    s is the step's noise scale *without* √−dt: the authors leave dt out on purpose.
    """
    return ((mean - mean_ref.detach()).square() / (2 * s.square())).flatten(1).mean(1)

"""Distances between policies."""

from __future__ import annotations

from torch import Tensor


def gaussian_step(mean: Tensor, mean_ref: Tensor, s: Tensor) -> Tensor:
    """Flow-GRPO: mean over C,H,W of (μ − μ_ref)² / 2s², one value a step (N,).

    s is the step's noise scale *without* √−dt: the authors leave dt out on purpose.
    """
    return _distance(mean, mean_ref, s)


def gaussian_divergence(mean: Tensor, mean_old: Tensor, std: Tensor) -> Tensor:
    """KL between two steps of one noise, per element: mean over C,H,W of (μ − μ_old)² / 2c²,
    c = std of the step *with* √−dt. One value a step (N,)."""
    return _distance(mean, mean_old, std)


def _distance(mean: Tensor, other: Tensor, scale: Tensor) -> Tensor:
    return ((mean - other.detach()).square() / (2 * scale.square())).flatten(1).mean(1)

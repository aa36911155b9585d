"""KL divergences between policies."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gesso.formulas.precision import wide

Estimator = Literal["k1", "k2", "k3"]
EXPONENT = 20.0


def gaussian_step(mean: Tensor, mean_ref: Tensor, s: Tensor) -> Tensor:
    """Flow-GRPO: mean over C,H,W of (μ − μ_ref)² / 2s², one value per step (N,).

    s is the step's noise scale *without* √−dt: the authors omit dt on purpose.
    """
    return _distance(mean, mean_ref, s)


def half_square(mean: Tensor, other: Tensor) -> Tensor:
    """mean over C,H,W of (μ − μ')² / 2, one value per step (N,): the distance of two steps without
    noise. Of Euler steps it is ½dt²·mean (v − v')²."""
    return _distance(mean, other, mean.new_ones(()))


def gaussian_divergence(mean: Tensor, mean_old: Tensor, std: Tensor) -> Tensor:
    """KL between two steps with the same std, per element: mean over C,H,W of (μ − μ_old)² / 2c²,
    c = std of the step *with* √−dt. One value per step (N,)."""
    return _distance(mean, mean_old, std)


def estimate(logp: Tensor, ref_logp: Tensor, kind: Estimator) -> Tensor:
    """Estimates of KL(π‖π_ref), each from one sampled token (Schulman, "Approximating KL
    divergence"): k1 = ℓ − ℓ_ref, k2 = ½·k1², k3 = e^−k1 + k1 − 1. Any shape; no gradient to the
    reference.

    As a *value*, in the reward or a metric: k1 and k3 are unbiased, k2 is not; k3 is never
    negative. As a *loss*, differentiated at fixed on-policy tokens: the gradient of k2 has the
    expectation ∇KL(π‖π_ref); that of k3 has ∇KL(π_ref‖π), another divergence with the same minimum;
    that of k1 has expectation 0 and only adds noise.

    The exponent is clamped at 20, beyond which k3 is constant without gradient. The reference codes
    also clamp k1 at +20. That side cannot overflow, and the clamp would drop the gradient of the
    tokens that have drifted furthest from the reference, so it is omitted, as is verl's clamp of k3
    at 10.
    """
    k1 = wide(logp) - wide(ref_logp).detach()
    if kind == "k1":
        return k1
    if kind == "k2":
        return 0.5 * k1.square()
    if kind == "k3":
        exponent = (-k1).clamp(max=EXPONENT)
        return torch.expm1(exponent) - exponent  # exp(x) − 1 would round a small KL to 0
    raise ValueError(f"unknown KL estimator {kind!r}; use k1, k2 or k3")


def _distance(mean: Tensor, other: Tensor, scale: Tensor) -> Tensor:
    return ((mean - other.detach()).square() / (2 * scale.square())).flatten(1).mean(1)

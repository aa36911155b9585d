"""DiffusionNFT (arXiv 2509.16117): contrasts two mixtures of the current and the old velocity.

x_t = (1−t)·x0 + t·ε. v, v_old, x0, x_t: (N, C, H, W); t, reward: (N,).
"""

from __future__ import annotations

from torch import Tensor

from gesso.formulas.shapes import column

ADVANTAGE_CLIP = 5.0
MIN_WEIGHT = 1e-5


def optimality(advantage: Tensor, clip: float = ADVANTAGE_CLIP) -> Tensor:
    """Advantage → probability of being a good sample: clip(A/clip/2 + ½, 0, 1)."""
    return (advantage / clip / 2 + 0.5).clamp(0, 1)


def contrast(
    v: Tensor,
    v_old: Tensor,
    x0: Tensor,
    x_t: Tensor,
    t: Tensor,
    optimal: Tensor,
    beta: float,
    clip: float = ADVANTAGE_CLIP,
) -> Tensor:
    """(N,): r·L⁺ + (1−r)·L⁻, times clip/β as in the authors' code, where

    v⁺ = βv + (1−β)v_old, v⁻ = (1+β)v_old − βv, x̂± = x_t − t·v±,
    L± = mean((x̂± − x0)² / w±), w± = max(mean|x̂± − x0|, 1e-5) in float64 without gradient.
    """
    time = column(t, x_t)
    v_old = v_old.detach()
    good = x_t - time * (beta * v + (1 - beta) * v_old)
    bad = x_t - time * ((1 + beta) * v_old - beta * v)
    loss = optimal * _weighted(good, x0) + (1 - optimal) * _weighted(bad, x0)
    return loss * (clip / beta)


def _weighted(guess: Tensor, x0: Tensor) -> Tensor:
    error = guess - x0
    weight = error.detach().double().abs().flatten(1).mean(1).clamp(min=MIN_WEIGHT)
    return (error.square().flatten(1).mean(1) / weight).to(guess.dtype)


def old_decay(step: int, schedule: int) -> float:
    """d in old ← d·old + (1−d)·θ after an iteration that ended with optimizer step `step`, counted
    from 1 as in the authors' code.

    Schedule 1: min(.001·step, .5). Schedule 2: 0 until 75, then min(.0075(step−75), .999).
    """
    if schedule == 1:
        return min(0.001 * step, 0.5)
    if schedule == 2:
        return min(0.0075 * max(step - 75, 0), 0.999)
    raise ValueError(f"DiffusionNFT has decay schedules 1 and 2, got {schedule}")

"""Paths from a recorded state to a clean sample, through which the gradient of a reward flows.

`velocity(x, σ)` is the model's velocity (noise − image) with gradient; x: (N, C, H, W), σ: (N,).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from gesso.formulas.flow_steps import euler

Velocity = Callable[[Tensor, Tensor], Tensor]


def draft(velocity: Velocity, x: Tensor, sigmas: Sequence[Tensor]) -> Tensor:
    """DRaFT-K (arXiv 2309.17400): Euler steps from `x` at the first of K+1 noise levels to the
    last; the gradient flows through all of them and ends at `x`."""
    x = x.detach()
    for sigma, sigma_next in pairwise(sigmas):
        x = euler(x, velocity(x, sigma), sigma, sigma_next)
    return x


def refl(velocity: Velocity, x: Tensor, sigma: Tensor) -> Tensor:
    """ReFL (arXiv 2304.05977): the clean sample predicted at `x`, x̂0 = x − σ·v."""
    return leaped(velocity, x.detach(), sigma, sigma.new_zeros(len(sigma)))


@dataclass(frozen=True)
class Leap:
    clean: Tensor  # (N, C, H, W): the value of the sampled one, the gradient of the predicted one
    weight: Tensor  # (N,): smaller where the predictions are far from the sampled states


def leap_align(
    velocity: Velocity,
    states: tuple[Tensor, Tensor, Tensor],
    sigmas: tuple[Tensor, Tensor],
    inner: float,
    floor: float,
) -> Leap:
    """LeapAlign (arXiv 2604.15311): two leaps, from x_k at σ_k to x_j at σ_j and from there to 0,
    along a sampled path whose `states` are x_k, x_j and x_0. x̂_j = x_k + (σ_j − σ_k)·v_k and
    x̂0 = x_j − σ_j·v_j give the gradient, the sampled states the values. The gradient that enters
    v_j through x_j is multiplied by `inner` (α). The weight is 1/(max(d_j, τ) + max(d_0, τ)), where
    d is mean |x̂ − x| and τ = `floor`.
    """
    start, middle, end = (state.detach() for state in states)
    from_start = leaped(velocity, start, *sigmas)
    x = straight_through(middle, from_start)
    into_network = inner * x + (1 - inner) * x.detach()
    v = velocity(into_network, sigmas[1])
    predicted = euler(x, v, sigmas[1], sigmas[1].new_zeros(len(x)))
    distances = [
        (guess.detach() - state).abs().flatten(1).mean(1).clamp(min=floor)
        for guess, state in ((from_start, middle), (predicted, end))
    ]
    return Leap(straight_through(end, predicted), 1 / sum(distances))


def leaped(velocity: Velocity, x: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """One Euler step of any length."""
    return euler(x, velocity(x, sigma), sigma, sigma_next)


def straight_through(value: Tensor, gradient: Tensor) -> Tensor:
    """The value of the one with the gradient of the other."""
    return gradient + (value - gradient).detach()


def hinge(reward: Tensor, target: float | None) -> Tensor:
    """−r, or max(h − r, 0): no gradient above the target h."""
    return -reward if target is None else (target - reward).clamp(min=0)

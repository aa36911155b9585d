"""One denoising step of a flow-matching model, drawn or scored again by the same function.

σ runs from 1 (noise) to 0 (picture); a step goes from σ to σ' with dt = σ' − σ < 0; v is the
model's velocity (noise − picture). x, v: (N, C, H, W); σ, σ': (N,), so that one batch may hold
different steps of a path. Everything is float32, whatever the model runs in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Transition:
    """Distribution of x' given x: N(mean, std²) per element, and how its log-prob is counted."""

    mean: Tensor  # (N, C, H, W)
    std: Tensor  # (N, 1, 1, 1); 0 where the step is deterministic
    s: Tensor  # (N, 1, 1, 1): the rule's own noise scale; Flow-SDE's std is s·√−dt
    full_density: bool  # False: −(x'−μ)² alone, as CPS's reference counts it

    def draw(self, noise: Tensor) -> Tensor:
        return self.mean + self.std * noise

    def logp(self, x_next: Tensor) -> Tensor:
        """(N,): mean over C,H,W of the log-density (the sum was found unstable by Flow-GRPO's
        authors). Gradients reach the mean, never x'. A deterministic step has no density: its
        log-prob is 0 with no gradient, so that nothing downstream can turn into NaN."""
        error = (x_next.detach() - self.mean).square()
        if self.full_density:
            std = torch.where(self.std > 0, self.std, 1.0)
            density = -error / (2 * std.square()) - std.log() - 0.5 * _LOG_2PI
        else:
            density = -error
        return torch.where(self.std > 0, density, 0.0).flatten(1).mean(1)


Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Transition]


def flow_sde(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_1: Tensor, noise: float
) -> Transition:
    """Flow-GRPO (arXiv 2505.05470), eq. 9: s = a·√(σ/(1−σ)),
    μ = x(1 + s²dt/2σ) + v(1 + s²(1−σ)/2σ)dt, std = s√−dt.

    Departure, as in the authors' code: σ = 1 in 1−σ is replaced by σ_1, the schedule's second
    entry, since s would be infinite there. With a = 0 this is the Euler step exactly.
    """
    dt = sigma_next - sigma
    s2 = noise**2 * sigma / (1 - torch.where(sigma == 1, sigma_1, sigma))
    mean = x * (1 + s2 * dt / (2 * sigma)) + v * (1 + s2 * (1 - sigma) / (2 * sigma)) * dt
    return Transition(mean, (s2 * -dt).sqrt(), s2.sqrt(), full_density=True)


def cps(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_1: Tensor, noise: float
) -> Transition:
    """Coefficients-preserving sampling (Flow-CPS, arXiv 2509.05952): s = σ'·sin(aπ/2),
    μ = (1−σ')x̂0 + √(σ'²−s²)·x̂1, std = s; the noise level after the step is σ' exactly, so
    the pictures stay clean. The reference's log-prob is mean(−(x'−μ)²), without 1/2s².
    """
    clean, pure_noise = x - sigma * v, x + (1 - sigma) * v
    std = sigma_next * math.sin(noise * math.pi / 2)
    mean = (1 - sigma_next) * clean + (sigma_next.square() - std.square()).sqrt() * pure_noise
    return Transition(mean, std, std, full_density=False)


def euler(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """x' = x + v·dt, the deterministic step; shapes as above."""
    return x + v * _column(sigma_next - sigma)


RULES: dict[str, Rule] = {"flow-sde": flow_sde, "cps": cps}


def transition(
    rule: str,
    x: Tensor,
    v: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    sigma_1: float | Tensor,
    noise: float,
) -> Transition:
    """The step of that name. Sampling draws from it, training asks it for the log-prob again."""
    second = torch.as_tensor(sigma_1, dtype=torch.float32, device=x.device)
    return RULES[rule](
        x.float(), v.float(), _column(sigma.float()), _column(sigma_next.float()), second, noise
    )


def _column(value: Tensor) -> Tensor:
    return value.view(-1, 1, 1, 1)

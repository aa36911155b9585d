"""One denoising step of a flow-matching model: the same function samples it and recomputes its
log-prob.

σ runs from 1 (noise) to 0 (image); a step goes from σ to σ' with dt = σ' − σ < 0; v is the
model's velocity (noise − image). x, v: (N, C, H, W) or, of videos, (N, C, F, H, W); σ, σ': (N,), so
that one batch may contain different steps of a trajectory. Everything is float32, regardless of
the model's precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gesso.formulas.shapes import column

_LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Transition:
    """Distribution of x' given x: N(mean, std²) per element, and how its log-prob is computed."""

    mean: Tensor  # (N, C, H, W)
    std: Tensor  # (N, 1, …); 0 where the step is deterministic
    s: Tensor  # (N, 1, …): the rule's noise scale; Flow-SDE's std is s·√−dt
    full_density: bool  # False: only −(x'−μ)², as in the reference code of CPS

    def draw(self, noise: Tensor) -> Tensor:
        return self.mean + self.std * noise

    def logp(self, x_next: Tensor) -> Tensor:
        """(N,): mean over all axes of a latent of the log-density (Flow-GRPO's authors report that
        the sum is unstable). Gradients flow to the mean, never to x'. A deterministic step has no
        density: its log-prob is 0 without gradient, so that no NaN reaches the loss. Added up in
        float64: on a GPU the order depends on the number of rows, with which the last bit of a sum
        in float32 would change."""
        error = (x_next.detach() - self.mean).square()
        if self.full_density:
            std = torch.where(self.std > 0, self.std, 1.0)
            density = -error / (2 * std.square()) - std.log() - 0.5 * _LOG_2PI
        else:
            density = -error
        density = torch.where(self.std > 0, density, 0.0).flatten(1)
        return density.mean(1, dtype=torch.float64).to(density.dtype)


Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Transition]


def flow_sde(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_1: Tensor, noise: float
) -> Transition:
    """Flow-GRPO (arXiv 2505.05470), eq. 9: s = a·√(σ/(1−σ)),
    μ = x(1 + s²dt/2σ) + v(1 + s²(1−σ)/2σ)dt, std = s√−dt.

    Departure, as in the authors' code: σ = 1 in 1−σ is replaced by σ_1, the schedule's second
    entry, since s would be infinite there. With a = 0 this is exactly the Euler step.
    """
    s2 = noise**2 * sigma / (1 - torch.where(sigma == 1, sigma_1, sigma))
    return _sde(x, v, sigma, sigma_next, s2)


def flash(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_1: Tensor, noise: float
) -> Transition:
    """Flash-GRPO (arXiv 2605.15980): Flow-SDE's step with s = a·σ_1·σ, which is finite at σ = 1."""
    return _sde(x, v, sigma, sigma_next, (noise * sigma_1 * sigma).square())


def _sde(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, s2: Tensor) -> Transition:
    dt = sigma_next - sigma
    mean = x * (1 + s2 * dt / (2 * sigma)) + v * (1 + s2 * (1 - sigma) / (2 * sigma)) * dt
    return Transition(mean, (s2 * -dt).sqrt(), s2.sqrt(), full_density=True)


def cps(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_1: Tensor, noise: float
) -> Transition:
    """Coefficients-preserving sampling (Flow-CPS, arXiv 2509.05952): s = σ'·sin(aπ/2),
    μ = (1−σ')x̂0 + √(σ'²−s²)·x̂1, std = s; the noise level after the step is exactly σ', so no
    noise remains in the images. The reference code's log-prob is mean(−(x'−μ)²), without 1/2s².
    """
    clean, pure_noise = x - sigma * v, x + (1 - sigma) * v
    std = sigma_next * math.sin(noise * math.pi / 2)
    mean = (1 - sigma_next) * clean + (sigma_next.square() - std.square()).sqrt() * pure_noise
    return Transition(mean, std, std, full_density=False)


def dance(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_1: Tensor, noise: float
) -> Transition:
    """DanceGRPO (arXiv 2505.07818): the same noise η at every σ, std = η√−dt,
    μ = x + v·dt + ½η²·(x − (1−σ)x̂0)/σ²·dt, where x̂0 = x − σv. η = 0 is the Euler step.
    """
    dt = sigma_next - sigma
    clean = x - sigma * v
    drift = (x - (1 - sigma) * clean) / sigma.square()  # minus the score
    mean = x + v * dt + 0.5 * noise**2 * drift * dt
    scale = torch.full_like(dt, noise)
    return Transition(mean, scale * (-dt).sqrt(), scale, full_density=True)


def euler(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """x' = x + v·dt, the deterministic step; shapes as above."""
    return x + v * column(sigma_next - sigma, x)


@dataclass(frozen=True)
class Clean:
    """A prediction of the clean image, and the noise level at which it was made."""

    x: Tensor  # (N, C, H, W)
    sigma: Tensor  # (N,)


def dpm2(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, before: Clean | None
) -> tuple[Tensor, Clean]:
    """DPM-Solver++(2M) (arXiv 2211.01095) for a flow: second order with one velocity per step, from
    the current prediction of the clean image and the one `before`. With λ = log((1−σ)/σ),
    h = λ' − λ and r = (λ − λ_before)/h:
    x' = (σ'/σ)·x + ((1−σ') − (σ'/σ)(1−σ))·D,  D = x̂0 + (x̂0 − x̂0_before)/2r.

    The first step, and steps next to σ = 1 or σ' = 0 where λ is infinite, have D = x̂0, which is
    exactly the Euler step.
    """
    now, end = column(sigma.float(), x), column(sigma_next.float(), x)
    clean = x - now * v
    guess = clean
    if before is not None:
        last = column(before.sigma.float(), x)
        finite = (last < 1) & (end > 0)
        log_snr = [torch.log((1 - s) / s) for s in (last, now, torch.where(finite, end, now / 2))]
        r = (log_snr[1] - log_snr[0]) / (log_snr[2] - log_snr[1])
        guess = torch.where(finite, clean + (clean - before.x) / (2 * r), clean)
    x_next = end / now * x + ((1 - end) - end / now * (1 - now)) * guess
    return x_next, Clean(clean, sigma)


RULES: dict[str, Rule] = {"flow-sde": flow_sde, "cps": cps, "dance": dance, "flash": flash}


def transition(
    rule: str,
    x: Tensor,
    v: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    sigma_1: float | Tensor,
    noise: float,
) -> Transition:
    """The step under `rule`. Sampling draws from it; training recomputes log-probs with it."""
    second = torch.as_tensor(sigma_1, dtype=torch.float32, device=x.device)
    now, end = column(sigma.float(), x), column(sigma_next.float(), x)
    return RULES[rule](x.float(), v.float(), now, end, second, noise)


def scales(rule: str, sigmas: Tensor, steps: range, noise: float) -> tuple[Tensor, Tensor]:
    """s and std of these steps of a schedule, (len(steps),) each."""
    index = torch.tensor(steps, device=sigmas.device)
    nothing = sigmas.new_zeros(len(index), 1)
    sigma, sigma_next = sigmas[index], sigmas[index + 1]
    step = transition(rule, nothing, nothing, sigma, sigma_next, sigmas[1], noise)
    return step.s.flatten(), step.std.flatten()


def inverse_gain(s: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """(N,): c = 1/(q/s + sq(1−σ)/2σ), q = √−dt. A step's log-prob has the gradient −ε/(c·D) with
    respect to each of the D elements of v, so c gives every step the same (Flash-GRPO)."""
    q = (sigma - sigma_next).sqrt()
    return 1 / (q / s + s * q * (1 - sigma) / (2 * sigma))

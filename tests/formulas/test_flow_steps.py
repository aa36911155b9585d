"""Golden values of the references, identities, and plain re-computations; gradients too."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal

from gesso.formulas import flow_steps

# SD3.5's scheduler, shift 3, 10 steps, noise level .7
SIGMAS = [1, 0.96013, 0.91335, 0.85769, 0.79037, 0.70728, 0.60215, 0.46488, 0.27805, 0.00893, 0]
STD = [0.70000, 0.74296, 0.53615, 0.44590, 0.39179, 0.35280, 0.31907, 0.28201, 0.22536, 0.00628]


def batch(n: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, 2, 4, 6, generator=g) for _ in range(3))  # type: ignore[return-value]


def sd35_sigmas() -> torch.Tensor:
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    return scheduler.sigmas


def test_golden_schedule_of_sd35() -> None:
    assert sd35_sigmas().tolist() == pytest.approx(SIGMAS, abs=6e-6)


def test_golden_standard_deviations_of_flow_sde() -> None:
    x, v, _ = batch(10)
    sigmas = sd35_sigmas()
    step = flow_steps.transition("flow-sde", x, v, sigmas[:-1], sigmas[1:], sigmas[1], 0.7)
    assert step.std.flatten().tolist() == pytest.approx(STD, abs=6e-6)


@pytest.mark.parametrize("sigma, after", [(1.0, 0.9), (0.6, 0.45), (0.3, 0.0)])
def test_flow_sde_equals_a_plain_computation(sigma: float, after: float) -> None:
    x, v, noise = batch()
    s = 0.7 * math.sqrt(sigma / (1 - (0.9 if sigma == 1 else sigma)))
    dt = after - sigma
    drift = s**2 / (2 * sigma)
    mean = x + (v + drift * (x + (1 - sigma) * v)) * dt  # the SDE in its textbook form
    step = flow_steps.transition(
        "flow-sde", x, v, torch.full((3,), sigma), torch.full((3,), after), 0.9, 0.7
    )
    torch.testing.assert_close(step.mean, mean)
    x_next = step.draw(noise)
    std = s * math.sqrt(-dt)
    torch.testing.assert_close(x_next, mean + std * noise)
    expected = Normal(mean, std).log_prob(x_next).mean(dim=(1, 2, 3))
    torch.testing.assert_close(step.logp(x_next), expected)


def test_flow_sde_without_noise_is_euler_and_has_no_density() -> None:
    x, v, noise = batch()
    sigma, after = torch.full((3,), 0.6), torch.full((3,), 0.4)
    step = flow_steps.transition("flow-sde", x, v, sigma, after, 0.9, 0.0)
    torch.testing.assert_close(step.draw(noise), flow_steps.euler(x, v, sigma, after))
    assert step.logp(x).tolist() == [0, 0, 0]


def test_flow_sde_keeps_the_marginal_to_first_order() -> None:
    """With the true velocity of x = σ·ε (clean picture 0), variance after a small step is σ'²."""
    g = torch.Generator().manual_seed(1)
    sigma, after = 0.5, 0.499
    x = sigma * torch.randn(4, 8, 64, 64, generator=g)
    v = x / sigma
    step = flow_steps.transition(
        "flow-sde", x, v, torch.full((4,), sigma), torch.full((4,), after), 0.9, 0.7
    )
    drawn = step.draw(torch.randn(x.shape, generator=g))
    assert (drawn.std() / x.std()).item() == pytest.approx(after / sigma, abs=4e-4)


def test_cps_equals_a_plain_computation_and_keeps_coefficients() -> None:
    x, v, noise = batch()
    sigma, after, a = 0.7, 0.5, 0.8
    s = after * math.sin(a * math.pi / 2)
    mean = (1 - after) * (x - sigma * v) + math.sqrt(after**2 - s**2) * (x + (1 - sigma) * v)
    step = flow_steps.transition(
        "cps", x, v, torch.full((3,), sigma), torch.full((3,), after), 0.9, a
    )
    torch.testing.assert_close(step.mean, mean)
    x_next = step.draw(noise)
    torch.testing.assert_close(x_next, mean + s * noise)
    torch.testing.assert_close(step.logp(x_next), -((s * noise) ** 2).mean(dim=(1, 2, 3)))
    kept = math.sqrt(after**2 - s**2) ** 2 + s**2
    assert kept == pytest.approx(after**2)


def test_last_cps_step_is_deterministic_and_never_nan() -> None:
    x, v, noise = batch()
    v.requires_grad_()
    step = flow_steps.transition("cps", x, v, torch.full((3,), 0.2), torch.zeros(3), 0.9, 0.8)
    torch.testing.assert_close(step.draw(noise), x - 0.2 * v)
    step.logp(step.draw(noise)).sum().backward()
    assert torch.isfinite(v.grad).all() and not v.grad.any()


@pytest.mark.parametrize("rule", ["flow-sde", "cps"])
def test_gradient_of_logp_equals_finite_differences(rule: str) -> None:
    x, v, noise = batch(1)
    sigma, after = torch.tensor([0.7]), torch.tensor([0.5])
    x_next = flow_steps.transition(rule, x, v, sigma, after, 0.9, 0.7).draw(noise)

    def logp(at: torch.Tensor) -> torch.Tensor:
        return flow_steps.transition(rule, x, at, sigma, after, 0.9, 0.7).logp(x_next).sum()

    moved = v.clone().requires_grad_()
    logp(moved).backward()
    direction = torch.randn(v.shape, generator=torch.Generator().manual_seed(5))
    slope = (logp(v + 1e-2 * direction) - logp(v - 1e-2 * direction)) / 2e-2
    assert (moved.grad * direction).sum().item() == pytest.approx(slope.item(), rel=1e-2)


def test_one_batch_may_hold_different_steps() -> None:
    x, v, noise = batch(2)
    sigma, after = torch.tensor([1.0, 0.5]), torch.tensor([0.9, 0.3])
    both = flow_steps.transition("flow-sde", x, v, sigma, after, 0.9, 0.7)
    for i in range(2):
        one = flow_steps.transition(
            "flow-sde", x[i : i + 1], v[i : i + 1], sigma[i : i + 1], after[i : i + 1], 0.9, 0.7
        )
        torch.testing.assert_close(both.mean[i : i + 1], one.mean)
        torch.testing.assert_close(both.logp(noise)[i : i + 1], one.logp(noise[i : i + 1]))

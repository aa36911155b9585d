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
    return tuple(torch.randn(n, 2, 4, 6, generator=g) for _ in range(3))


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


def test_log_probs_are_rounded_once() -> None:
    """Their sum does not depend on its order, which on a GPU changes with the number of rows."""
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 7, 4, 64, 64, generator=generator)
    step = flow_steps.transition(
        "flow-sde", x, v, torch.full((7,), 0.6), torch.full((7,), 0.45), 0.9, 0.7
    )
    error = (x - step.mean).square()
    density = -error / (2 * step.std.square()) - step.std.log() - 0.5 * math.log(2 * math.pi)
    assert torch.equal(step.logp(x), density.double().flatten(1).mean(1).float())


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


@pytest.mark.parametrize("rule", ["flow-sde", "cps", "dance"])
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


def test_dance_equals_a_plain_computation() -> None:
    x, v, noise = batch()
    sigma, after, eta = 0.7, 0.5, 0.3
    clean = x - sigma * v
    score = -(x - (1 - sigma) * clean) / sigma**2
    mean = x + (v - 0.5 * eta**2 * score) * (after - sigma)  # the reverse SDE in its textbook form
    step = flow_steps.transition(
        "dance", x, v, torch.full((3,), sigma), torch.full((3,), after), 0.9, eta
    )
    torch.testing.assert_close(step.mean, mean)
    std = eta * math.sqrt(sigma - after)
    x_next = step.draw(noise)
    torch.testing.assert_close(x_next, mean + std * noise)
    expected = Normal(mean, std).log_prob(x_next).mean(dim=(1, 2, 3))
    torch.testing.assert_close(step.logp(x_next), expected)
    assert step.s.flatten().tolist() == pytest.approx([eta] * 3)


def test_dance_hand_computed_at_both_ends() -> None:
    """One number: x = 2, v = 1, η = .5. From σ = 1: x̂0 = 1, drift = 2 ⇒ μ = 2 − .2 − .05 = 1.75.
    From σ = .2 to 0: x̂0 = 1.8, drift = (2 − 1.44)/.04 = 14 ⇒ μ = 2 − .2 − .35 = 1.45."""
    x, v = torch.full((2, 1, 1, 1), 2.0), torch.ones(2, 1, 1, 1)
    sigma, after = torch.tensor([1.0, 0.2]), torch.tensor([0.8, 0.0])
    step = flow_steps.transition("dance", x, v, sigma, after, 0.8, 0.5)
    assert step.mean.flatten().tolist() == pytest.approx([1.75, 1.45])
    assert step.std.flatten().tolist() == pytest.approx([0.5 * math.sqrt(0.2)] * 2)


def test_dance_without_noise_is_euler() -> None:
    x, v, noise = batch()
    sigma, after = torch.full((3,), 0.6), torch.full((3,), 0.4)
    step = flow_steps.transition("dance", x, v, sigma, after, 0.9, 0.0)
    torch.testing.assert_close(step.draw(noise), flow_steps.euler(x, v, sigma, after))
    assert step.logp(x).tolist() == [0, 0, 0]


def solve(solver: str, steps: int) -> torch.Tensor:
    """From σ = .95 to .05 along the exact velocity of data N(1, .25): x = (1−σ)x0 + σε has
    variance (1−σ)²/4 + σ², and every path keeps its quantile."""
    x = torch.full((1, 1, 1, 1), 1.7, dtype=torch.float64)
    sigmas = torch.linspace(0.95, 0.05, steps + 1, dtype=torch.float64)
    before = None
    for sigma, after in zip(sigmas[:-1, None], sigmas[1:, None], strict=True):
        variance = (1 - sigma) ** 2 / 4 + sigma**2
        z = (x - (1 - sigma)) / variance.sqrt()
        v = -1 + z * (sigma - (1 - sigma) / 4) / variance.sqrt()  # dx/dσ at a fixed quantile
        if solver == "dpm2":
            x, before = flow_steps.dpm2(x, v, sigma, after, before)
        else:
            x = flow_steps.euler(x, v, sigma, after)
    return x.squeeze()


def test_dpm2_is_of_second_order_and_euler_of_first() -> None:
    def spread(sigma: float) -> float:
        return math.sqrt((1 - sigma) ** 2 / 4 + sigma**2)

    exact = 0.95 + (1.7 - 0.05) / spread(0.95) * spread(0.05)
    for solver, order in (("euler", 1), ("dpm2", 2)):
        errors = [abs(float(solve(solver, n)) - exact) for n in (40, 80)]
        assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.25), solver
    assert abs(float(solve("dpm2", 20)) - exact) < abs(float(solve("euler", 20)) - exact) / 3


def test_dpm2_step_is_that_of_diffusers() -> None:
    from diffusers import DPMSolverMultistepScheduler

    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    scheduler.set_timesteps(3)
    scheduler.sigmas = torch.tensor([0.9, 0.7, 0.4, 0.1])
    x, v, v_before = batch()
    clean_before = x - 0.9 * v_before  # any guess will do: the step is a formula in two guesses
    clean = x - 0.7 * v
    scheduler._step_index = 1
    expected = scheduler.multistep_dpm_solver_second_order_update([clean_before, clean], sample=x)
    before = flow_steps.Clean(clean_before, torch.full((3,), 0.9))
    got, kept = flow_steps.dpm2(x, v, torch.full((3,), 0.7), torch.full((3,), 0.4), before)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(kept.x, clean)


@pytest.mark.parametrize("last, now, end", [(None, 0.8, 0.5), (1.0, 0.8, 0.5), (0.5, 0.2, 0.0)])
def test_dpm2_is_euler_where_it_has_no_second_order(
    last: float | None, now: float, end: float
) -> None:
    x, v, guess = batch()
    before = None if last is None else flow_steps.Clean(guess, torch.full((3,), last))
    sigma, after = torch.full((3,), now), torch.full((3,), end)
    got, _ = flow_steps.dpm2(x, v, sigma, after, before)
    torch.testing.assert_close(got, flow_steps.euler(x, v, sigma, after))


def wan_sigmas(steps: int = 20, shift: float = 3.0) -> torch.Tensor:
    """The schedule of Flash-GRPO's authors."""
    even = 0.999 * (1 - torch.arange(steps + 1, dtype=torch.float64) / steps)
    return shift * even / (1 + (shift - 1) * even)


def test_golden_weights_of_flash_grpo() -> None:
    sigmas = wan_sigmas()
    s, std = flow_steps.scales("flash", sigmas, range(10), 1.0)
    torch.testing.assert_close(s.double(), sigmas[1] * sigmas[:10], rtol=1e-6, atol=0)
    torch.testing.assert_close(std, s * (sigmas[:10] - sigmas[1:11]).sqrt().float())
    got = flow_steps.inverse_gain(s, sigmas[:10], sigmas[1:11]).tolist()
    assert [got[0], got[1], got[9]] == pytest.approx([7.476982, 7.041366, 3.775384], rel=1e-6)


def test_golden_weights_with_the_noise_of_flow_sde() -> None:
    sigmas = sd35_sigmas()
    s, std = flow_steps.scales("flow-sde", sigmas, range(9), 0.7)
    got = flow_steps.inverse_gain(s, sigmas[:9], sigmas[1:10])[[0, 1, 4, 8]]
    assert got.tolist() == pytest.approx([17.556757, 12.756598, 3.787399, 0.672608], rel=1e-5)
    tempflow = (std / std.mean())[[0, 1, 8]]  # the authors' 2.25·std, whose mean is .999011
    expected = [x / 0.999011 for x in (1.575, 1.671669, 0.507061)]
    assert tempflow.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("rule", ["flow-sde", "flash"])
def test_inverse_gain_gives_every_step_the_same_gradient(rule: str) -> None:
    """c·∂logp/∂v = −ε/D."""
    x, v, noise = batch(9)
    v.requires_grad_()
    sigmas = sd35_sigmas()
    step = flow_steps.transition(rule, x, v, sigmas[:9], sigmas[1:10], sigmas[1], 0.7)
    c = flow_steps.inverse_gain(step.s.flatten(), sigmas[:9], sigmas[1:10])
    (c * step.logp(step.draw(noise).detach())).sum().backward()
    expected = -noise / noise[0].numel()
    torch.testing.assert_close(v.grad, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("rule", flow_steps.RULES)
def test_frames_are_one_more_axis(rule: str) -> None:
    """A step of latents (C, F, H, W) is that of (C, F·H, W)."""
    x, v, noise = torch.randn(3, 2, 3, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    sigma, sigma_next = torch.tensor([0.9, 0.6]), torch.tensor([0.8, 0.5])
    video = flow_steps.transition(rule, x, v, sigma, sigma_next, 0.9, 0.5)
    flat = (x.flatten(2, 3), v.flatten(2, 3))
    image = flow_steps.transition(rule, *flat, sigma, sigma_next, 0.9, 0.5)
    ahead = video.draw(noise)
    assert torch.equal(ahead.flatten(2, 3), image.draw(noise.flatten(2, 3)))
    torch.testing.assert_close(video.logp(ahead), image.logp(ahead.flatten(2, 3)))
    before = torch.tensor([0.95, 0.7])
    moved, _ = flow_steps.dpm2(x, v, sigma, sigma_next, flow_steps.Clean(v, before))
    same, _ = flow_steps.dpm2(*flat, sigma, sigma_next, flow_steps.Clean(flat[1], before))
    assert torch.equal(moved.flatten(2, 3), same)

from __future__ import annotations

import math

import pytest
import torch

from gesso.formulas import averages, kl
from gesso.formulas.objectives import clipped, guarded, masked


def test_on_policy_ratio_is_one_and_the_gradient_is_reinforce() -> None:
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantage = torch.tensor([0.5, -3.0])
    result = clipped(logp, logp.detach().clone(), advantage, 1e-4, 1e-4)
    assert result.ratio.tolist() == [1, 1]
    assert not result.clipped.any()
    result.loss.sum().backward()
    assert logp.grad.tolist() == pytest.approx([-0.5, 3.0])


# (ratio, advantage) → (loss, gradient d loss / d logp, clipped), ε = .2, computed by hand
CASES = [
    (1.5, 1.0, -1.2, 0.0, True),
    (1.5, -1.0, 1.5, 1.5, False),
    (0.5, 1.0, -0.5, -0.5, False),
    (0.5, -1.0, 0.8, 0.0, True),
    (1.1, 2.0, -2.2, -2.2, False),
]


@pytest.mark.parametrize("ratio, advantage, loss, gradient, is_clipped", CASES)
def test_hand_computed(
    ratio: float, advantage: float, loss: float, gradient: float, is_clipped: bool
) -> None:
    logp = torch.tensor([math.log(ratio)], requires_grad=True)
    result = clipped(logp, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.2)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(loss)
    assert logp.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert bool(result.clipped) is is_clipped


def test_kl_between_two_steps() -> None:
    mean = torch.tensor([[[[1.0, 2.0]]], [[[0.0, 0.0]]]], requires_grad=True)
    reference = torch.tensor([[[[0.0, 0.0]]], [[[0.0, 0.0]]]])
    s = torch.tensor([0.5, 0.5]).view(2, 1, 1, 1)
    distance = kl.gaussian_step(mean, reference, s)
    assert distance.tolist() == pytest.approx([(1 + 4) / 2 / (2 * 0.25), 0.0])
    distance.sum().backward()
    assert mean.grad[0].flatten().tolist() == pytest.approx([1 / 2 / 0.25, 2 / 2 / 0.25])


def test_ema() -> None:
    assert averages.ema_decay(0, 0.9) == pytest.approx(0.1)
    assert averages.ema_decay(90, 0.9) == pytest.approx(0.9)
    assert averages.ema_decay(9, 0.9) == pytest.approx(10 / 19)
    average, new = {"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}
    averages.blend_(average, new, 0.75)
    assert average["w"].item() == pytest.approx(1.5)


def gaussian_steps() -> tuple[torch.Tensor, ...]:
    """Four steps of different noise: ε, the old mean, the new one (with gradient) and c."""
    g = torch.Generator().manual_seed(2)
    noise, old, shift = (torch.randn(4, 2, 3, 5, generator=g) for _ in range(3))
    std = torch.tensor([0.7, 0.4, 0.2, 0.05]).view(4, 1, 1, 1)
    return noise, old, (old + 1e-2 * shift).requires_grad_(), std


def logp_of(x: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Normal(mean, std).log_prob(x).flatten(1).mean(1)


def test_guarded_ratio_is_the_noise_times_the_shift() -> None:
    """Expanding the squares: log r = mean ε·(μ−μ_old), whatever the step's noise. Its gradient on
    the mean is r·ε/n: no step's gradient is blown up by 1/c."""
    noise, old, mean, std = gaussian_steps()
    x = old + std * noise
    divergence = kl.gaussian_divergence(mean, old, std)
    advantage = torch.tensor([1.0, -1.0, 2.0, 0.5])
    result = guarded(
        logp_of(x, mean, std), logp_of(x, old, std), advantage, divergence, std.flatten(), 10.0
    )
    shift = (noise * (mean - old)).flatten(1).mean(1)
    torch.testing.assert_close(result.ratio.log(), shift.detach(), rtol=1e-3, atol=1e-6)
    result.loss.sum().backward()
    expected = -(advantage * shift.exp()).view(4, 1, 1, 1) * noise / 30
    torch.testing.assert_close(mean.grad, expected.detach(), rtol=2e-3, atol=1e-5)


def test_guard_does_not_mix_terms() -> None:
    """b of one term must not leak into another's ratio: the reference's batch-wide b does."""
    noise, old, mean, std = gaussian_steps()
    x, ones = old + std * noise, torch.ones(4)

    def ratios(rows: slice) -> torch.Tensor:
        m, o, s, at = mean[rows].detach(), old[rows], std[rows], x[rows]
        b = kl.gaussian_divergence(m, o, s)
        return guarded(logp_of(at, m, s), logp_of(at, o, s), ones[rows], b, s.flatten(), 1.0).ratio

    torch.testing.assert_close(ratios(slice(0, 4))[:1], ratios(slice(0, 1)))


def test_guard_hand_computed_and_clipped() -> None:
    """log r = (logp − old + b)·c = (.3 + .1)·.5 = .2; ε = .1 clips it for A > 0."""
    logp = torch.tensor([-0.7], requires_grad=True)
    for advantage, loss, gradient in ((2.0, -2.2, 0.0), (-2.0, 2 * math.exp(0.2), math.exp(0.2))):
        logp.grad = None
        terms = (torch.tensor([-1.0]), torch.tensor([advantage]), torch.tensor([0.1]))
        result = guarded(logp, *terms, torch.tensor([0.5]), 0.1)
        result.loss.sum().backward()
        assert result.loss.item() == pytest.approx(loss)
        assert logp.grad.item() == pytest.approx(gradient, abs=1e-6)


# (ratio, advantage, divergence) → (gradient d loss / d logp, dropped), limit .01
MASKED = [
    (1.5, 1.0, 0.02, 0.0, True),  # moved too far and pushed further
    (1.5, 1.0, 0.005, -1.5, False),  # further, but not yet too far
    (1.5, -1.0, 0.02, 1.5, False),  # too far, but pulled back
    (0.5, -1.0, 0.02, 0.0, True),
    (0.5, 1.0, 0.02, -0.5, False),
    (1.5, 1.0, 0.01, 0.0, True),  # the limit itself counts
    (1.0, 1.0, 0.02, -1.0, False),
]


@pytest.mark.parametrize("ratio, advantage, divergence, gradient, dropped", MASKED)
def test_mask_hand_computed(
    ratio: float, advantage: float, divergence: float, gradient: float, dropped: bool
) -> None:
    logp = torch.tensor([math.log(ratio)], requires_grad=True)
    result = masked(
        logp, torch.zeros(1), torch.tensor([advantage]), torch.tensor([divergence]), 0.01
    )
    assert result.loss.item() == pytest.approx(-advantage * ratio)
    assert bool(result.clipped) is dropped
    if dropped:
        assert not result.loss.requires_grad or not torch.autograd.grad(result.loss, logp)[0].any()
    else:
        assert torch.autograd.grad(result.loss, logp)[0].item() == pytest.approx(gradient)


def test_divergence_is_the_kl_of_two_gaussians() -> None:
    _, old, mean, std = gaussian_steps()
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(mean, std), normal(old, std))
    got = kl.gaussian_divergence(mean, old, std)
    torch.testing.assert_close(got, expected.flatten(1).mean(1))

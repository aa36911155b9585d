"""Estimators of KL from drawn tokens, against exact expectations over a small vocabulary."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from gesso.formulas import flow_steps
from gesso.formulas.kl import (
    Estimator,
    estimate,
    gaussian_divergence,
    gaussian_step,
    half_square,
)

KINDS = get_args(Estimator)


def policies() -> tuple[torch.Tensor, torch.Tensor]:
    """Three contexts, a vocabulary of six: logits of the policy (with gradient), log-probs of the
    reference."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, generator=g, dtype=torch.float64).requires_grad_()
    reference = torch.randn(3, 6, generator=g, dtype=torch.float64).log_softmax(1)
    return logits, reference


def expected(kind: Estimator, logp: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """E over tokens drawn from the policy, all of them enumerated; the drawing has no gradient."""
    return (logp.detach().exp() * estimate(logp, ref, kind)).sum()


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum()


def test_golden_distances_of_distillation() -> None:
    """SD3.5's schedule, step 2, a = .7: three scales, of which kl / kl-without-dt is 1/|dt|, and
    without noise the Euler step's."""
    sigma, sigma_next = torch.tensor([0.91335]), torch.tensor([0.857693])
    x, teacher = torch.tensor([0.3, -1.2]).view(1, 1, 1, 2), torch.tensor([0.1, -0.2])

    def step(v: torch.Tensor, noise: float) -> flow_steps.Transition:
        row = v.view(1, 1, 1, 2)
        return flow_steps.transition("flow-sde", x, row, sigma, sigma_next, 0.96013, noise)

    v = torch.tensor([0.4, -0.6]).requires_grad_()
    own, other = step(v, 0.7), step(teacher, 0.7).mean
    square = half_square(own.mean, other)
    true = gaussian_divergence(own.mean, other, own.std).item()
    without_dt = gaussian_step(own.mean, other, own.s).item()
    golden = [3.00091e-4, 1.04394e-3, 5.81024e-5]
    assert [square.item(), true, without_dt] == pytest.approx(golden, rel=2e-4)
    assert true / without_dt == pytest.approx(1 / 0.0556566, rel=1e-4)
    square.sum().backward()
    assert v.grad is not None
    assert v.grad.tolist() == pytest.approx([7.20218e-4, -9.60291e-4], rel=2e-4)
    plain = half_square(step(v, 0.0).mean, step(teacher, 0.0).mean).item()
    assert plain == pytest.approx(1.93604e-4, rel=2e-4)
    assert half_square(own.mean, own.mean).item() == 0


def test_by_hand() -> None:
    """k1 = log 2, −log 4 and 0; k3 = ½ + log 2 − 1, 4 − log 4 − 1 and 0."""
    logp = torch.tensor([[math.log(0.5), math.log(0.1)], [-1.0, -1.0]])
    ref = torch.tensor([[math.log(0.25), math.log(0.4)], [-1.0, -1.0]])
    two, four = math.log(2), math.log(4)
    by_hand = {
        "k1": [two, -four, 0, 0],
        "k2": [two**2 / 2, four**2 / 2, 0, 0],
        "k3": [two - 0.5, 3 - four, 0, 0],
    }
    for kind in KINDS:
        got = estimate(logp, ref, kind)
        assert got.shape == (2, 2)
        assert got.flatten().tolist() == pytest.approx(by_hand[kind], abs=1e-7)


def test_gradients_by_hand() -> None:
    """d/dℓ: 1, k1 and 1 − e^−k1, at k1 = log 2 and −log 4."""
    ref = torch.tensor([[-3.0], [-1.0]])
    slopes = {
        "k1": [1, 1],
        "k2": [math.log(2), -math.log(4)],
        "k3": [1 - 1 / 2, 1 - 4],
    }
    for kind in KINDS:
        logp = (ref + torch.tensor([[math.log(2)], [-math.log(4)]])).requires_grad_()
        estimate(logp, ref, kind).sum().backward()
        assert logp.grad.flatten().tolist() == pytest.approx(slopes[kind], rel=1e-5)


def test_as_a_value_k1_and_k3_are_unbiased_and_k2_is_not() -> None:
    logits, ref = policies()
    logp = logits.log_softmax(1)
    exact = divergence(logp, ref).item()
    assert expected("k1", logp, ref).item() == pytest.approx(exact, rel=1e-12)
    assert expected("k3", logp, ref).item() == pytest.approx(exact, rel=1e-12)
    assert abs(expected("k2", logp, ref).item() / exact - 1) > 0.05


def test_as_a_loss_k2_has_the_gradient_of_the_reverse_kl() -> None:
    logits, ref = policies()
    (exact,) = torch.autograd.grad(divergence(logits.log_softmax(1), ref), logits)
    (got,) = torch.autograd.grad(expected("k2", logits.log_softmax(1), ref), logits)
    torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-14)


def test_as_a_loss_k1_has_gradient_zero() -> None:
    logits, ref = policies()
    (got,) = torch.autograd.grad(expected("k1", logits.log_softmax(1), ref), logits)
    assert got.abs().max() < 1e-14


def test_as_a_loss_k3_has_the_gradient_of_the_forward_kl() -> None:
    logits, ref = policies()
    (forward,) = torch.autograd.grad(divergence(ref, logits.log_softmax(1)), logits)
    (reverse,) = torch.autograd.grad(divergence(logits.log_softmax(1), ref), logits)
    (got,) = torch.autograd.grad(expected("k3", logits.log_softmax(1), ref), logits)
    torch.testing.assert_close(got, forward, rtol=1e-10, atol=1e-14)
    assert (got - reverse).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_gets_no_gradient(kind: Estimator) -> None:
    logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    ref = torch.tensor([[-2.0, -1.0]], requires_grad=True)
    estimate(logp, ref, kind).sum().backward()
    assert ref.grad is None and logp.grad is not None


def test_far_away_is_finite() -> None:
    """k1 = −30: cut at 20, no gradient. k1 = 30: not cut, and still pulled back with slope 1."""
    logp = torch.tensor([[-31.0, -1.0], [-101.0, -0.1]], requires_grad=True)
    ref = torch.tensor([[-1.0, -31.0], [-0.5, -200.1]])
    got = estimate(logp, ref, "k3")
    assert got.flatten().tolist() == pytest.approx(
        [math.exp(20) - 21, 29, math.exp(20) - 21, 199], rel=1e-6
    )
    got.sum().backward()
    assert logp.grad.flatten().tolist() == pytest.approx([0, 1, 0, 1])
    assert estimate(logp, ref, "k1").flatten().tolist() == pytest.approx([-30, 30, -100.5, 200])
    assert estimate(logp, ref, "k2")[1, 1].item() == pytest.approx(20000)


def test_a_small_kl_is_not_rounded_away() -> None:
    """k1 = ±1e-4 in float32: k3 = 5e-9, far below the rounding of e^x near 1."""
    k1 = torch.tensor([[1e-4, -1e-4], [1e-3, -1e-3]])
    got = estimate(k1, torch.zeros(2, 2), "k3")
    torch.testing.assert_close(got, k1.square() / 2, rtol=2e-3, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_widened(kind: Estimator) -> None:
    logp, ref = torch.tensor([[-1.0, -1.5]]).bfloat16(), torch.tensor([[-1.25, -1.0]]).bfloat16()
    got = estimate(logp, ref, kind)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, estimate(logp.float(), ref.float(), kind))
    assert estimate(logp.double(), ref.double(), kind).dtype == torch.float64


def test_unknown_estimator() -> None:
    with pytest.raises(ValueError, match="k4"):
        estimate(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]

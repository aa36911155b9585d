"""AWM and DGPO against values computed with their authors' code, and identities between them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gesso.formulas import matching, objectives


def rows(values: list[list[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1, 2)


X0 = rows([[0.5, -1], [1.5, 0.25], [-0.5, 0.75], [0, 1]])
NOISE = rows([[0.2, -0.4], [-0.6, 0.8], [1, -0.2], [0.3, -0.9]])
T = torch.tensor([0.5, 0.8, 0.5, 0.8], dtype=torch.float64)
V = rows([[-0.1, 0.3], [-1.5, 0.9], [1.2, -1.1], [0.5, -1.5]])
OLD = rows([[0, 0.5], [-1.8, 0.6], [1.3, -1], [0.4, -1.7]])
REFERENCE = rows([[0.1, 0.2], [-2, 0.5], [1.4, -1.2], [0.6, -1.4]])
A = torch.tensor([1.2, -0.7], dtype=torch.float64)
PAIRS = torch.tensor([0, 0, 1, 1])
SIGNS = torch.tensor([1, -1, 0.5, -0.5], dtype=torch.float64)


def losses(v: Tensor) -> Tensor:
    return matching.loss(v, X0[: len(v)], NOISE[: len(v)])


def flat(values: Tensor) -> list[float]:
    return values.flatten().tolist()


def test_noised_is_on_the_line_between_image_and_noise() -> None:
    got = matching.noised(X0, NOISE, T)
    expected = (1 - T.view(-1, 1, 1, 1)) * X0 + T.view(-1, 1, 1, 1) * NOISE
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "v, expected",
    [
        (V, [0.065, 0.24125, 0.05625, 0.1]),
        (OLD, [0.05, 0.04625, 0.02125, 0.025]),
        (REFERENCE, [0.16, 0.00625, 0.03625, 0.17]),
    ],
)
def test_matching_loss(v: Tensor, expected: list[float]) -> None:
    assert flat(losses(v)) == pytest.approx(expected)


def test_its_gradient_is_that_of_supervised_fine_tuning() -> None:
    v = V[:2].clone().requires_grad_()
    loss = losses(v).mean()
    loss.backward()
    assert float(loss) == pytest.approx(0.153125)
    assert flat(v.grad) == pytest.approx([0.1, -0.15, 0.3, 0.175])


def test_it_is_computed_in_float32() -> None:
    half = torch.full((1, 1, 1, 2), 1.0, dtype=torch.bfloat16)
    assert matching.loss(half, half, half).dtype == torch.float32


@pytest.mark.parametrize(
    "weighting, expected",
    [
        ("uniform", [-0.065, -0.24125]),
        ("t", [-0.0325, -0.193]),
        ("t2", [-0.01625, -0.1544]),
        ("huber", [-0.127470, -0.392930]),
        ("ghuber", [-1.003529, -2.232558]),
    ],
)
def test_awm_log_likelihood(weighting: matching.Weighting, expected: list[float]) -> None:
    got = matching.log_likelihood(losses(V[:2]).float(), T[:2].float(), weighting, 0.25)
    assert got.dtype == torch.float64
    assert flat(got) == pytest.approx(expected, abs=2e-6)


def awm(v: Tensor, old: Tensor | None, weighting: matching.Weighting, clip: float) -> Tensor:
    logp = matching.log_likelihood(losses(v), T[:2], weighting, 0.25)
    before = logp.detach()
    if old is not None:
        before = matching.log_likelihood(losses(old), T[:2], weighting, 0.25)
    return objectives.clipped(logp, before, A, clip, clip).loss.mean()


@pytest.mark.parametrize(
    "old, weighting, clip, loss, grad",
    [
        (None, "uniform", 1.0, -0.25, [0.12, -0.18, -0.21, -0.1225]),
        (None, "ghuber", 1.0, -0.25, [0.466086, -0.699129, -0.488044, -0.284692]),
        (OLD[:2], "ghuber", 1e-4, -0.212775, [0.437142, -0.655714, 0, 0]),
    ],
)
def test_awm_loss_and_gradient(
    old: Tensor | None, weighting: matching.Weighting, clip: float, loss: float, grad: list[float]
) -> None:
    v = V[:2].clone().requires_grad_()
    got = awm(v, old, weighting, clip)
    got.backward()
    assert float(got) == pytest.approx(loss, abs=1e-6)
    assert flat(v.grad) == pytest.approx(grad, abs=1e-6)


@pytest.mark.parametrize("weighting", ["huber", "ghuber"])
def test_awm_has_a_gradient_at_a_perfect_match(weighting: matching.Weighting) -> None:
    perfect = (NOISE - X0)[:1].clone().requires_grad_()
    matching.log_likelihood(losses(perfect), T[:1], weighting, 0.25).sum().backward()
    assert perfect.grad.isfinite().all()


def dgpo(v: Tensor, beta: float, clip: float | None) -> Tensor:
    current = losses(v)
    weights = matching.group_weights(SIGNS, current.detach(), losses(REFERENCE), PAIRS, beta)
    if clip is not None:
        beyond = matching.beyond(current, losses(OLD), SIGNS, clip)
        current = torch.where(beyond, current.detach(), current)
    return (weights * SIGNS * current).mean()


GRADIENT = [0.008055, -0.012083, -0.024166, -0.014097, -0.020851, -0.010425, -0.013900, -0.027801]


@pytest.mark.parametrize("clip", [None, 0.01])
def test_dgpo_loss_and_gradient(clip: float | None) -> None:
    """The clip removes the gradient of rows 2 and 4, not their value."""
    v = V.clone().requires_grad_()
    loss = dgpo(v, 10.0, clip)
    loss.backward()
    kept = [1, 1, 0, 0, 1, 1, 0, 0] if clip else [1] * 8
    assert float(loss) == pytest.approx(-0.010140, abs=1e-6)
    expected = [g * k for g, k in zip(GRADIENT, kept, strict=True)]
    assert flat(v.grad) == pytest.approx(expected, abs=1e-6)


def test_dgpo_weights() -> None:
    got = matching.group_weights(SIGNS, losses(V), losses(REFERENCE), PAIRS, 10.0)
    assert flat(got) == pytest.approx([0.161109] * 2 + [0.556014] * 2, abs=1e-6)


@pytest.mark.parametrize(
    "groups, expected",
    [([0, 0, 0, 0], [0.329047] * 4), ([0, 0, 1, 1], [0.304703] * 2 + [0.528095] * 2)],
)
def test_dgpo_weights_depend_on_the_whole_group(groups: list[int], expected: list[float]) -> None:
    """Cut in halves, with G = 4 as before, they would be others."""
    beta = 10.0 * 4 / 4 if len(set(groups)) == 1 else 10.0 * 2 / 4
    group = torch.tensor(groups)
    got = matching.group_weights(SIGNS, losses(V), losses(REFERENCE), group, beta)
    assert flat(got) == pytest.approx(expected, abs=1e-6)


def test_dgpo_is_the_gradient_of_a_preference_per_group() -> None:
    """β·∇ = ∇ mean over groups of softplus(S): the paper's loss is −log σ(−S)."""
    beta, v, other = 10.0, V.clone().requires_grad_(), V.clone().requires_grad_()
    dgpo(v, beta, None).backward()
    gain = SIGNS * (losses(other) - losses(REFERENCE))
    softplus = F.softplus(beta / 2 * gain.view(2, 2).sum(1))
    softplus.mean().backward()
    torch.testing.assert_close(beta * v.grad, other.grad)


def test_dgpo_at_the_reference_is_half_of_awm() -> None:
    v, other = REFERENCE.clone().requires_grad_(), REFERENCE.clone().requires_grad_()
    dgpo(v, 10.0, None).backward()
    (SIGNS * losses(other)).mean().backward()
    torch.testing.assert_close(v.grad, other.grad / 2)


def test_dgpo_of_a_pair_is_dpo() -> None:
    """G = 2, A = ±1: the gradient of −log σ(−½β[(L_w − L_w,ref) − (L_l − L_l,ref)]) / β."""
    beta, sign = 2.0, torch.tensor([1.0, -1.0]).double()
    v, other = V[:2].clone().requires_grad_(), V[:2].clone().requires_grad_()
    reference = losses(REFERENCE[:2])
    weights = matching.group_weights(sign, losses(V[:2]), reference, PAIRS[:2], beta)
    (weights * sign * losses(v)).mean().backward()
    won, lost = losses(other) - reference
    inside = -0.5 * beta * (won - lost)
    assert float(inside) == pytest.approx(0.33)
    (-F.logsigmoid(inside)).backward()
    torch.testing.assert_close(v.grad, other.grad / beta)


def test_beyond() -> None:
    """A term stops where it has already moved in the direction of its advantage."""
    loss, old = torch.tensor([0.0, 0.0, 0.1, 0.1]), torch.tensor([0.1, 0.1, 0.0, 0.0])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert matching.beyond(loss, old, advantage, 0.05).tolist() == [True, False, False, True]
    assert not matching.beyond(loss, old, advantage, math.expm1(0.1) + 1e-3).any()


def test_times_between_the_steps_of_a_schedule() -> None:
    """With the schedule's shift: 3u/(1 + 2u), here by a fine schedule."""
    sigmas = torch.tensor([1.0, 0.9, 0.5, 0.0])
    got = matching.on_schedule(sigmas, torch.tensor([0.0, 1.0, 1.5, 2.5, 3.0]))
    assert got.tolist() == pytest.approx([1.0, 0.9, 0.7, 0.25, 0.0])
    even = torch.linspace(1, 0, 1001)
    u = torch.tensor([0.1234, 0.5, 0.9])
    shifted = matching.on_schedule(3 * even / (1 + 2 * even), 1000 * (1 - u))
    torch.testing.assert_close(shifted, 3 * u / (1 + 2 * u), rtol=0, atol=1e-5)

"""Paths with gradient: the values of four Euler steps of v = θx, computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gesso.formulas import reward_gradient as paths

SIGMAS = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0], dtype=torch.float64)
THETA = 0.4


def states() -> list[Tensor]:
    """x at every noise level, from 1.5."""
    found = [torch.full((1, 1, 1, 1), 1.5, dtype=torch.float64)]
    for step in range(4):
        found.append(found[-1] * (1 + THETA * (SIGMAS[step + 1] - SIGMAS[step])))
    return found


def sigma(step: int) -> Tensor:
    return SIGMAS[step].view(1)


def gradient(path) -> tuple[float, float]:
    """x_4, and the gradient of ½(x_4 − 2)² with respect to θ."""
    theta = torch.tensor(THETA, dtype=torch.float64, requires_grad=True)
    end = path(lambda x, sigma: theta * x)
    (end - 2).square().sum().mul(0.5).backward()
    assert theta.grad is not None
    return float(end.detach()), float(theta.grad)


@pytest.mark.parametrize(
    "k, expected", [(1, 0.277708), (2, 0.555416), (3, 0.833124), (4, 1.110832)]
)
def test_draft(k: int, expected: float) -> None:
    levels = [sigma(step) for step in range(4 - k, 5)]
    end, grad = gradient(lambda v: paths.draft(v, states()[4 - k], levels))
    assert end == pytest.approx(0.98415, abs=1e-12)
    assert grad == pytest.approx(expected, abs=1e-6)


def test_draft_by_hand() -> None:
    """(x_4 − 2)·Σ_i dt_i·x_i·Π_{j>i}(1 + dt_j·θ)."""
    x, expected = states(), 0.0
    for i in range(4):
        rest = 1.0
        for j in range(i + 1, 4):
            rest *= 1 + float(SIGMAS[j + 1] - SIGMAS[j]) * THETA
        expected += float(SIGMAS[i + 1] - SIGMAS[i]) * float(x[i]) * rest
    _, grad = gradient(lambda v: paths.draft(v, x[0], [sigma(step) for step in range(5)]))
    assert grad == pytest.approx((float(x[4]) - 2) * expected, rel=1e-12)


@pytest.mark.parametrize("step, expected", [(1, 1.068188), (2, 0.624510), (3, 0.277708)])
def test_refl(step: int, expected: float) -> None:
    _, grad = gradient(lambda v: paths.refl(v, states()[step], sigma(step)))
    assert grad == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("inner, expected", [(0.0, 1.379016), (0.3, 1.333303), (1.0, 1.226639)])
def test_leap_align(inner: float, expected: float) -> None:
    x = states()
    sampled, sigmas = (x[0], x[2], x[4]), (sigma(0), sigma(2))
    end, grad = gradient(lambda v: paths.leap_align(v, sampled, sigmas, inner, 0.1).clean)
    assert end == pytest.approx(0.98415, abs=1e-12), "the value is the sampled one"
    assert grad == pytest.approx(expected, abs=1e-6)


def test_the_weight_of_a_leap_falls_with_its_error() -> None:
    x = states()
    far = (x[0], x[2] + 0.5, x[4] - 0.3)
    leap = paths.leap_align(lambda y, s: THETA * y, far, (sigma(0), sigma(2)), 0.3, 0.1)
    middle = abs(float(x[0] * (1 - 0.5 * THETA) - far[1]))
    end = abs(float(far[1] * (1 - 0.5 * THETA) - far[2]))
    assert min(middle, end) > 0.1
    assert float(leap.weight) == pytest.approx(1 / (middle + end))


def test_above_the_hinge_there_is_no_gradient() -> None:
    reward = torch.tensor([0.2, 0.6, 0.9], requires_grad=True)
    loss = paths.hinge(reward, 0.6)
    assert loss.tolist() == pytest.approx([0.4, 0.0, 0.0])
    loss.sum().backward()
    assert reward.grad is not None and reward.grad.tolist()[::2] == [-1, 0]
    assert torch.equal(paths.hinge(reward, None), -reward)

from __future__ import annotations

import math

import pytest
import torch

from gesso.formulas import averages, kl
from gesso.formulas.objectives import clipped


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

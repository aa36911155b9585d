"""DPO of responses: golden values, a plain computation with gradients, identities."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gesso.formulas.aggregation import token_weights
from gesso.formulas.dpo import pairs

CHOSEN = torch.tensor([-1.0, -0.5, -2.0, -1.2, -0.9, -1.8]).double().view(2, 3)  # ℓ, ℓ_ref
REJECTED = torch.tensor([-1.5, -2.5, -1.4, -2.0]).double().view(2, 2)
SIGN, GROUP = torch.tensor([1.0, -1.0]), torch.tensor([4, 4])


def gains() -> Tensor:
    return torch.stack([(each[0] - each[1]).sum() for each in (CHOSEN, REJECTED)])


def test_golden_values() -> None:
    found = pairs(gains(), SIGN, GROUP, beta=0.1)
    assert found.loss.tolist() == pytest.approx([0.644397] * 2, abs=1e-6)
    assert found.margin.tolist() == pytest.approx([1.0, 1.0])
    assert found.weight.tolist() == pytest.approx([0.047502, -0.047502], abs=1e-6)


def test_the_weights_give_the_gradient_of_the_loss() -> None:
    """Of three pairs in any order, written plainly."""
    gain = torch.tensor([0.3, -1.2, 0.9, 2.0, -0.4, 0.1], dtype=torch.float64, requires_grad=True)
    sign, group = torch.tensor([1.0, 1, -1, -1, 1, -1]), torch.tensor([7, 2, 7, 2, 5, 5])
    loss = sum(
        -torch.log(1 / (1 + torch.exp(-0.7 * (gain[chosen] - gain[rejected]))))
        for chosen, rejected in ((0, 2), (1, 3), (4, 5))
    )
    (expected,) = torch.autograd.grad(loss, gain)
    found = pairs(gain.detach(), sign, group, beta=0.7)
    assert torch.allclose(-found.weight, expected)
    assert float(found.loss.sum()) == pytest.approx(2 * float(loss.detach()))


def test_at_the_reference() -> None:
    """ln 2, and a gradient of ∓β/2."""
    found = pairs(torch.zeros(2), SIGN, GROUP, beta=0.1)
    assert found.loss.tolist() == pytest.approx([math.log(2)] * 2)
    assert found.weight.tolist() == pytest.approx([0.05, -0.05])


def test_a_clear_preference_has_no_gradient_and_no_overflow() -> None:
    found = pairs(torch.tensor([1e5, -1e5]), SIGN, GROUP, beta=1.0)
    assert found.loss.tolist() == [0, 0] and found.weight.tolist() == [0, 0]
    wrong = pairs(torch.tensor([-1e5, 1e5]), SIGN, GROUP, beta=1.0)
    assert wrong.loss.tolist() == [2e5, 2e5] and wrong.weight.tolist() == [1, -1]


def test_supervised_fine_tuning_is_a_mean_over_all_tokens() -> None:
    """Not the mean of the means of two micro-batches, .733333."""
    logp = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, 0.0, 0.0]])
    mask = torch.tensor([[True] * 3, [True, False, False]])
    assert float(-(token_weights(mask, "token-mean") * logp).sum()) == pytest.approx(0.95)

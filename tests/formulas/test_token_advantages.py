"""Advantages per token: three responses of 4, 1 and 3 tokens in rows of 5, against plain loops."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from gesso.formulas import kl
from gesso.formulas.advantages import (
    gae,
    group_relative,
    leave_one_out,
    on_last,
    to_go,
    whiten,
)

LENGTHS = [4, 1, 3]
MASK = torch.arange(5) < torch.tensor(LENGTHS)[:, None]  # (3, 5)


def drawn(seed: int, padding: float = 0.0) -> torch.Tensor:
    """(3, 5) normal numbers, `padding` outside the mask."""
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(MASK, x, padding)


def plain_to_go(rewards: list[float], gamma: float) -> list[float]:
    """Σ γ^k r_{t+k} for each t, term by term."""
    n = len(rewards)
    return [sum(gamma ** (k - t) * rewards[k] for k in range(t, n)) for t in range(n)]


def plain_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Σ (γλ)^k δ_{t+k} for each t, term by term; the value after the end is 0."""
    n, after = len(rewards), [*values[1:], 0.0]
    delta = [rewards[t] + gamma * after[t] - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]


def check_rows(got: torch.Tensor, rows: list[list[float]]) -> None:
    assert got.dtype == torch.float64
    assert got.shape == (3, 5)
    for i, row in enumerate(rows):
        assert got[i, : LENGTHS[i]].tolist() == pytest.approx(row, rel=1e-12, abs=1e-14)
        assert got[i, LENGTHS[i] :].tolist() == [0.0] * (5 - LENGTHS[i])


def test_on_last() -> None:
    got = on_last(torch.tensor([2.0, -1.0, 0.5]), MASK)
    assert got.tolist() == [[0, 0, 0, 2, 0], [-1, 0, 0, 0, 0], [0, 0, 0.5, 0, 0]]
    assert got.dtype == torch.float64
    full = on_last(torch.tensor([3.0, 4.0]), torch.ones(2, 3, dtype=torch.bool))
    assert full.tolist() == [[0, 0, 3], [0, 0, 4]]


def test_to_go_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0, 2, 4, 9], [5, 9, 9, 9, 9], [0, 0, 8, 9, 9]])
    got = to_go(rewards, MASK, 0.5)
    assert got.tolist() == [[2, 2, 4, 4, 0], [5, 0, 0, 0, 0], [2, 4, 8, 0, 0]]


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("padding", [0.0, 1e9, math.nan])
def test_to_go_equals_a_plain_loop(gamma: float, padding: float) -> None:
    rewards = drawn(0, padding)
    rows = [plain_to_go(rewards[i, :n].tolist(), gamma) for i, n in enumerate(LENGTHS)]
    check_rows(to_go(rewards, MASK, gamma), rows)


def test_an_undiscounted_reward_at_the_end_reaches_every_token() -> None:
    rewards = torch.tensor([2.0, -1.0, 0.5])
    torch.testing.assert_close(
        to_go(on_last(rewards, MASK), MASK, 1.0), rewards.double()[:, None] * MASK
    )


@pytest.mark.parametrize("padding", [0.0, 1e9, math.nan])
def test_whiten_equals_python_statistics(padding: float) -> None:
    values = drawn(1, padding) * 3 + 7
    flat = values[MASK].tolist()
    mean, std = statistics.fmean(flat), statistics.pstdev(flat)
    rows = [[(v - mean) / std for v in values[i, :n].tolist()] for i, n in enumerate(LENGTHS)]
    got = whiten(values, MASK)
    check_rows(got, rows)
    assert got[MASK].mean().item() == pytest.approx(0, abs=1e-14)
    assert got[MASK].var(correction=0).item() == pytest.approx(1)


def test_whiten_by_hand() -> None:
    """Tokens 1, 3, 5, 7: mean 4, population variance (9 + 1 + 1 + 9)/4 = 5."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    got = whiten(torch.tensor([[1.0, 3, 5], [7, 100, 100]]), mask)
    assert (got * 5**0.5).tolist()[0] == pytest.approx([-3, -1, 1])
    assert (got * 5**0.5).tolist()[1] == pytest.approx([3, 0, 0])


@pytest.mark.parametrize("value", [0.1, 0.0, -1e6])
def test_equal_values_and_a_single_token_whiten_to_zero(value: float) -> None:
    values = torch.full((2, 2), value, dtype=torch.float64)
    three = torch.tensor([[True, True], [True, False]])  # the mean of three .1 is not .1
    assert whiten(values, three).tolist() == [[0.0, 0.0]] * 2
    alone = torch.tensor([[True, False]])
    assert whiten(torch.full((1, 2), value), alone).tolist() == [[0.0, 0.0]]


def test_rounding_is_not_whitened_into_signal() -> None:
    """Spread of 1e-6: variance far below the floor of 1e-8, so values are divided by 1e-4."""
    values = torch.zeros(3, 5, dtype=torch.float64)
    values[0, 0] = 8e-6
    got = whiten(values, MASK)
    assert got[0, 0].item() == pytest.approx(7e-6 / 1e-4)
    assert got[1, 0].item() == pytest.approx(-1e-6 / 1e-4)


def test_gae_by_hand() -> None:
    """γ = ½, λ = ½. Row 0, rewards 0, 0, 0, 8, values 4, 2, 6, 4: δ = −3, 1, −4, 4, so
    A = 4, −4 + 4/4 = −3, 1 − 3/4 = ¼, −3 + 1/16. Row 1: 3 − 1. Row 2, rewards 1, 0, 2, values
    2, 2, 0: δ = 0, −2, 2 and A = 2, −1.5, −.375. What stands in the padding does not matter."""
    rewards = torch.tensor([[0.0, 0, 0, 8, 50], [3, 50, 50, 50, 50], [1, 0, 2, 50, 50]])
    values = torch.tensor([[4.0, 2, 6, 4, 70], [1, 70, 70, 70, 70], [2, 2, 0, 70, 70]])
    got = gae(rewards, values, MASK, 0.5, 0.5)
    advantages = [[-2.9375, 0.25, -3, 4], [2.0], [-0.375, -1.5, 2]]
    returns = [[1.0625, 2.25, 3, 8], [3.0], [1.625, 0.5, 2]]
    check_rows(got.advantages, advantages)
    check_rows(got.returns, returns)


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.7, 0.5)])
@pytest.mark.parametrize("padding", [0.0, 1e9, math.nan])
def test_gae_equals_a_plain_loop(gamma: float, lam: float, padding: float) -> None:
    rewards, values = drawn(2, padding), drawn(3, padding)
    got = gae(rewards, values, MASK, gamma, lam)
    rows, returns = [], []
    for i, n in enumerate(LENGTHS):
        value = values[i, :n].tolist()
        rows.append(plain_gae(rewards[i, :n].tolist(), value, gamma, lam))
        returns.append([a + v for a, v in zip(rows[-1], value, strict=True)])
    check_rows(got.advantages, rows)
    check_rows(got.returns, returns)


def test_gae_with_lambda_one_returns_what_is_to_go_whatever_the_critic_says() -> None:
    rewards = drawn(4)
    for seed in (5, 6):
        got = gae(rewards, drawn(seed), MASK, 0.9, 1.0)
        torch.testing.assert_close(got.returns, to_go(rewards, MASK, 0.9))


def test_gae_with_lambda_zero_is_one_step() -> None:
    rewards, values = drawn(7), drawn(8)
    after = torch.cat([values[:, 1:], torch.zeros(3, 1)], 1)  # 0 outside the mask, as drawn
    got = gae(rewards, values, MASK, 0.9, 0.0)
    torch.testing.assert_close(got.advantages, rewards + 0.9 * after - values)


def test_a_row_does_not_depend_on_its_neighbours_or_on_the_padding() -> None:
    rewards, values = drawn(9), drawn(10)
    whole = gae(rewards, values, MASK, 0.9, 0.8)
    for i, n in enumerate(LENGTHS):
        alone = gae(rewards[i : i + 1, :n], values[i : i + 1, :n], MASK[i : i + 1, :n], 0.9, 0.8)
        assert torch.equal(alone.advantages[0], whole.advantages[i, :n])
        assert torch.equal(alone.returns[0], whole.returns[i, :n])


def test_a_gap_is_stepped_over() -> None:
    """Tokens that are not the policy's (a tool's answer, say): as if they were not there."""
    mask = torch.tensor([[True, True, False, False, True], [True, False, True, True, False]])
    rewards, values = drawn(15, 3.0)[:2], drawn(16, 4.0)[:2]
    estimate = gae(rewards, values, mask, 0.9, 0.8)
    togo, last = to_go(rewards, mask, 0.9), on_last(torch.tensor([2.0, 3.0]), mask)
    for i in range(2):
        r, v = rewards[i, mask[i]].tolist(), values[i, mask[i]].tolist()
        assert estimate.advantages[i, mask[i]].tolist() == pytest.approx(plain_gae(r, v, 0.9, 0.8))
        assert togo[i, mask[i]].tolist() == pytest.approx(plain_to_go(r, 0.9))
    for tensor in (estimate.advantages, estimate.returns, togo, last, whiten(values, mask)):
        assert not tensor[~mask].any()
    assert last.tolist() == [[0, 0, 0, 0, 2], [0, 0, 0, 3, 0]]


def test_advantages_carry_no_gradient() -> None:
    x, y = drawn(11).requires_grad_(), drawn(12).requires_grad_()
    estimate = gae(x, y, MASK, 0.9, 0.9)
    for tensor in (estimate.advantages, estimate.returns, to_go(x, MASK, 0.9), whiten(x, MASK)):
        assert not tensor.requires_grad


# The recipes of three papers, put together from the pieces and written down a second time.

REWARDS = torch.tensor([30.0, 1.0, 4.0])
GROUP = torch.tensor([1, 1, 1])
BETA = 0.1


def log_probs() -> tuple[torch.Tensor, torch.Tensor]:
    return drawn(13, -5.0), drawn(14, -9.0)


def plain_whitened(rows: list[list[float]]) -> list[list[float]]:
    flat = [x for row in rows for x in row]
    mean, std = statistics.fmean(flat), statistics.pstdev(flat)
    return [[(x - mean) / std for x in row] for row in rows]


def plain_shaped(ends: list[float], gamma: float) -> list[list[float]]:
    """−β·k1 at each token, the sequence's reward at the last, then what is to go."""
    logp, ref = log_probs()
    rows = []
    for i, n in enumerate(LENGTHS):
        rewards = [-BETA * (logp[i, t] - ref[i, t]).item() for t in range(n)]
        rewards[-1] += ends[i]
        rows.append(plain_to_go(rewards, gamma))
    return rows


def test_rloo_as_openrlhf_and_lmm_r1_have_it() -> None:
    """Baselines of the others: 30 − 2.5 = 27.5 → 10, 1 − 17 = −16 → −10, 4 − 15.5 = −11.5 → −10."""
    ends = leave_one_out(REWARDS, GROUP).clamp(-10, 10)
    assert ends.tolist() == [10.0, -10.0, -10.0]
    tokens = on_last(ends, MASK) - BETA * kl.estimate(*log_probs(), "k1")
    rows = plain_shaped([10.0, -10.0, -10.0], 1.0)
    openrlhf = to_go(tokens, MASK, 1.0)
    check_rows(openrlhf, rows)
    check_rows(whiten(openrlhf, MASK), plain_whitened(rows))


@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_plus_plus(baseline: bool) -> None:
    """The baseline is the mean of the group, (30 + 1 + 4)/3."""
    ends = group_relative(REWARDS, GROUP, "none") if baseline else REWARDS
    tokens = on_last(ends, MASK) - BETA * kl.estimate(*log_probs(), "k1")
    taken = 35 / 3 if baseline else 0.0
    rows = plain_shaped([r - taken for r in REWARDS.tolist()], 0.99)
    check_rows(whiten(to_go(tokens, MASK, 0.99), MASK), plain_whitened(rows))

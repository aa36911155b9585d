from __future__ import annotations

import statistics

import pytest
import torch

from gesso.formulas.advantages import (
    Std,
    extremes,
    flat_groups,
    gdpo,
    group_relative,
    leave_one_out,
    with_spread,
)

REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.7, 0.7, 0.9])
GROUP = torch.tensor([4, 4, 4, 9, 9, 2])


def plain(std: str) -> list[float]:
    rewards, group = REWARDS.double().tolist(), GROUP.tolist()
    result = []
    for r, g in zip(rewards, group, strict=True):
        members = [x for x, h in zip(rewards, group, strict=True) if h == g]
        scale = statistics.pstdev(rewards if std == "global" else members) + 1e-4
        result.append((r - statistics.fmean(members)) / scale if len(members) > 1 else 0.0)
    return result


@pytest.mark.parametrize("std", ["global", "group"])
def test_equals_a_plain_computation(std: Std) -> None:
    assert group_relative(REWARDS, GROUP, std).tolist() == pytest.approx(plain(std))


def test_hand_computed() -> None:
    # one group, rewards 0 and 1: mean .5, population std .5
    got = group_relative(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]), "group")
    assert got.tolist() == pytest.approx([-0.5 / 0.5001, 0.5 / 0.5001])
    assert got.dtype == torch.float64


def test_a_group_of_one_and_a_flat_group_have_no_advantage() -> None:
    got = group_relative(REWARDS, GROUP)
    assert got[5] == 0
    assert not got[3:5].any()


def test_the_defaults_are_those_of_flow_grpo() -> None:
    assert group_relative(REWARDS, GROUP).tolist() == pytest.approx(plain("global"))


def test_order_of_samples_does_not_matter() -> None:
    order = torch.tensor([5, 0, 3, 1, 4, 2])
    got = group_relative(REWARDS[order], GROUP[order])
    torch.testing.assert_close(got, group_relative(REWARDS, GROUP)[order])


def test_flat_groups() -> None:
    assert flat_groups(REWARDS, GROUP) == pytest.approx(2 / 3)


def test_equal_rewards_that_rounding_would_tell_apart() -> None:
    got = group_relative(torch.full((3,), 0.1), torch.zeros(3, dtype=torch.long), "group")
    assert got.tolist() == [0, 0, 0]  # .1 + .1 + .1 is not .3 in binary


def test_gdpo_hand_computed() -> None:
    """Two groups of two, two rewards. Each reward normalised in its group is ∓1 (or 0 where flat);
    weights 1 and .5 give ∓1.5, ∓.5; their mean is 0 and their std √((2.25 + .25)/2)."""
    rewards = torch.tensor([[0.0, 10.0], [1.0, 30.0], [0.3, 7.0], [0.5, 5.0]])
    got = gdpo(rewards, torch.tensor([1.0, 0.5]), torch.tensor([0, 0, 1, 1]))
    std = ((1.5**2 + 0.5**2) / 2) ** 0.5
    assert got.tolist() == pytest.approx([-1.5 / std, 1.5 / std, -0.5 / std, 0.5 / std], rel=3e-3)


def test_gdpo_equals_a_plain_computation() -> None:
    values = [[0.2, 3.0], [0.9, 3.0], [0.4, 5.0], [0.7, 1.0], [0.7, 2.0], [0.1, 9.0], [0.6, 8.0]]
    group, weights = [1, 1, 1, 5, 5, 2, 2], [0.3, 2.0]
    totals = [0.0] * 7
    for k in range(2):
        for i, g in enumerate(group):
            members = [values[j][k] for j in range(7) if group[j] == g]
            spread = statistics.pstdev(members) + 1e-4
            totals[i] += weights[k] * (values[i][k] - statistics.fmean(members)) / spread
    mean, std = statistics.fmean(totals), statistics.pstdev(totals) + 1e-4
    got = gdpo(torch.tensor(values), torch.tensor(weights), torch.tensor(group))
    assert got.tolist() == pytest.approx([(t - mean) / std for t in totals], rel=1e-5)


def test_gdpo_does_not_care_about_a_rewards_scale_and_a_sum_does() -> None:
    rewards = torch.rand(8, 2, generator=torch.Generator().manual_seed(0))
    weights, group = torch.ones(2), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    louder = rewards * torch.tensor([1.0, 1000.0])
    torch.testing.assert_close(
        gdpo(rewards, weights, group), gdpo(louder, weights, group), rtol=0.02, atol=0.02
    )
    summed = [group_relative(r @ weights, group) for r in (rewards, louder)]
    assert (summed[0] - summed[1]).abs().max() > 0.1


# rewards per group of two, multiple → which samples stay
SPREAD = [
    ([[0, 1], [1, 1], [0, 1]], 1, [0, 1, 4, 5]),
    ([[0, 1], [1, 1], [0, 1]], 4, [0, 1, 4, 5]),
    ([[0, 1], [1, 1], [0, 1]], 3, [0, 1, 2, 3, 4, 5]),  # topped up to 6 with the flat group
    ([[0, 1], [1, 1], [0, 0]], 2, [0, 1]),
    ([[0, 1], [1, 1], [0, 0]], 3, [0, 1, 2]),
    ([[1, 1], [2, 2]], 2, []),  # nothing to learn from: nothing is made up
    ([[0, 1]], 4, [0, 1]),  # as far as there is something to top up with
]


@pytest.mark.parametrize("groups, multiple, kept", SPREAD)
def test_groups_without_spread_leave(
    groups: list[list[float]], multiple: int, kept: list[int]
) -> None:
    rewards = torch.tensor(groups, dtype=torch.float64).flatten()[:, None]
    group = torch.arange(len(groups)).repeat_interleave(2)
    assert with_spread(rewards, group, multiple).tolist() == kept


def test_a_group_with_spread_in_any_reward_stays() -> None:
    rewards = torch.tensor([[1.0, 0.0], [1.0, 5.0], [2.0, 3.0], [2.0, 3.0]])
    assert with_spread(rewards, torch.tensor([7, 7, 3, 3]), 1).tolist() == [0, 1]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_gets_as_many_samples_and_mini_batches(ranks: int) -> None:
    """8 groups of 4 of which 3 have spread; 2 updates: what is kept splits evenly."""
    rewards = torch.zeros(32, 1)
    rewards[[0, 4, 20]] = 1.0
    kept = with_spread(rewards, torch.arange(8).repeat_interleave(4), 2 * ranks)
    parts = [part.tensor_split(2) for part in kept.tensor_split(ranks)]
    assert len({len(mini) for part in parts for mini in part}) == 1
    assert {0, 1, 2, 3, 4, 5, 6, 7, 20, 21, 22, 23} <= set(kept.tolist())


# Token models. Two groups and a lone sample, shuffled; sums by hand in the tests below.
TOKEN_REWARDS = torch.tensor([1.0, 0.0, 2.0, 1.0, 6.0, 7.0])
TOKEN_GROUP = torch.tensor([3, 8, 3, 8, 3, 5])


def test_grpo_for_tokens_by_hand() -> None:
    """Group 3: rewards 1, 2, 6, mean 3, unbiased variance (4 + 1 + 9)/2 = 7. Group 8: 0 and 1, mean
    ½, variance (¼ + ¼)/1 = ½. Group 5 has one sample."""
    got = group_relative(TOKEN_REWARDS, TOKEN_GROUP, "group", correction=1, epsilon=1e-6)
    three, eight = 7**0.5 + 1e-6, 0.5**0.5 + 1e-6
    expected = [-2 / three, -0.5 / eight, -1 / three, 0.5 / eight, 3 / three, 0.0]
    assert got.tolist() == pytest.approx(expected, rel=1e-12)
    assert got[5] == 0


def test_dr_grpo_by_hand() -> None:
    got = group_relative(TOKEN_REWARDS, TOKEN_GROUP, "none")
    assert got.tolist() == [-2.0, -0.5, -1.0, 0.5, 3.0, 0.0]
    assert got.dtype == torch.float64


@pytest.mark.parametrize("std", ["global", "group", "none"])
@pytest.mark.parametrize("correction", [0, 1])
def test_every_divisor_equals_a_plain_computation(std: Std, correction: int) -> None:
    g = torch.Generator().manual_seed(5)
    rewards = torch.rand(11, generator=g, dtype=torch.float64)
    group = torch.tensor([2, 2, 7, 7, 7, 7, 2, 0, 9, 9, 9])
    spread = statistics.stdev if correction else statistics.pstdev
    got = group_relative(rewards, group, std, correction, epsilon=0.01)
    for i, (r, h) in enumerate(zip(rewards.tolist(), group.tolist(), strict=True)):
        members = rewards[group == h].tolist()
        if len(members) == 1:
            assert got[i] == 0
            continue
        scale = 1.0
        if std != "none":
            scale = spread(rewards.tolist() if std == "global" else members) + 0.01
        assert got[i].item() == pytest.approx((r - statistics.fmean(members)) / scale, rel=1e-12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("std", ["global", "group", "none"])
@pytest.mark.parametrize("rewards, group", [([0.7], [4]), ([0.1, 0.1, 0.1, 5.0], [1, 1, 1, 2])])
def test_nothing_to_compare_with_is_zero_and_never_nan(
    std: Std, rewards: list[float], group: list[int]
) -> None:
    """One sample, one in a group, or equal rewards: their unbiased std is 0/0 or 0, or the rounding
    of (.1 + .1 + .1)/3, which is not .1 in float64."""
    r, g = torch.tensor(rewards, dtype=torch.float64), torch.tensor(group)
    assert group_relative(r, g, std, 1, 1e-6).tolist() == [0.0] * len(rewards)
    assert leave_one_out(r, g).tolist() == [0.0] * len(rewards)


def test_leave_one_out_by_hand() -> None:
    """Group 3: 1 − (2 + 6)/2, 2 − (1 + 6)/2, 6 − (1 + 2)/2. Group 8: 0 − 1 and 1 − 0."""
    got = leave_one_out(TOKEN_REWARDS, TOKEN_GROUP)
    assert got.tolist() == [-3.0, -1.0, -1.5, 1.0, 4.5, 0.0]
    assert got.dtype == torch.float64


def test_leave_one_out_is_dr_grpo_times_g_over_g_minus_one() -> None:
    rewards = torch.rand(12, generator=torch.Generator().manual_seed(1))
    group = torch.tensor([0, 1, 1, 0, 1, 2, 2, 2, 2, 2, 0, 1])
    size = torch.bincount(group)[group]
    expected = group_relative(rewards, group, "none") * size / (size - 1)
    torch.testing.assert_close(leave_one_out(rewards, group), expected, rtol=1e-12, atol=1e-14)


def test_small_differences_survive_in_float64() -> None:
    rewards = 1e6 + torch.tensor([0.0, 1e-4, 0.0, 3e-4], dtype=torch.float64)
    group = torch.tensor([0, 0, 1, 1])
    for got, factor in (
        (group_relative(rewards, group, "none"), 0.5),
        (leave_one_out(rewards, group), 1),
    ):
        assert (got / factor).tolist() == pytest.approx([-1e-4, 1e-4, -3e-4, 3e-4], rel=1e-4)


def test_extremes_of_groups() -> None:
    values, group = torch.tensor([1.0, 3, 3, 2, 5, 5, 0, 4]), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    best, worst = extremes(values, group)
    assert best.nonzero()[:, 0].tolist() == [1, 7]  # the first of equal ones; a tie is none
    assert worst.nonzero()[:, 0].tolist() == [0, 6]

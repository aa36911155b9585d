from __future__ import annotations

import statistics

import pytest
import torch

from gesso.formulas.advantages import flat_groups, gdpo, group_relative, with_spread

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
def test_equals_a_plain_computation(std: str) -> None:
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

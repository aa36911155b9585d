from __future__ import annotations

import statistics

import pytest
import torch

from gesso.formulas.advantages import flat_groups, group_relative

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
    assert got[3:5].abs().max() < 1e-12


def test_order_of_samples_does_not_matter() -> None:
    order = torch.tensor([5, 0, 3, 1, 4, 2])
    got = group_relative(REWARDS[order], GROUP[order])
    torch.testing.assert_close(got, group_relative(REWARDS, GROUP)[order])


def test_flat_groups() -> None:
    assert flat_groups(REWARDS, GROUP) == pytest.approx(2 / 3)

from __future__ import annotations

import math

import pytest
import torch

from gesso.formulas import diversity


def plainly(x: torch.Tensor, group: torch.Tensor) -> float:
    """The definition as a double loop."""
    means = []
    for g in sorted(set(group.tolist())):
        rows = [x[i].double() for i in range(len(x)) if group[i] == g]
        pairs = []
        for i in range(len(rows)):
            for j in range(i):
                pairs.append(math.sqrt(((rows[i] - rows[j]) ** 2).mean().item()))
        if pairs:
            means.append(sum(pairs) / len(pairs))
    return sum(means) / len(means)


def test_against_a_plain_double_loop() -> None:
    x = torch.randn(11, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    group = torch.tensor([7, 2, 7, 2, 7, 2, 2, 9, 4, 4, 7])  # mixed, unequal, 9 stands alone
    assert diversity.within_groups(x, group) == pytest.approx(plainly(x, group), rel=1e-6)


def test_by_hand() -> None:
    x = torch.tensor([[0.0, 0.0], [3.0, 3.0], [1.0, 0.0], [1.0, 2.0]])
    # group 0: 3; group 1: sqrt((0 + 4) / 2)
    expected = (3 + math.sqrt(2)) / 2
    assert diversity.within_groups(x, torch.tensor([0, 0, 1, 1])) == pytest.approx(expected)
    assert diversity.within_groups(x[:1].expand(3, 2), torch.zeros(3)) == 0


def test_the_resolution_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (16, 64):
        x = torch.randn(6, 4, size, size, generator=generator)
        assert diversity.within_groups(x, torch.zeros(6)) == pytest.approx(2**0.5, rel=0.02)


def test_images_close_together_keep_their_distance() -> None:
    """Computed from differences: far from 0 and in bfloat16 nothing cancels."""
    x = torch.full((2, 8), 256.0, dtype=torch.bfloat16)
    x[1] += 2
    assert diversity.within_groups(x, torch.zeros(2)) == 2


def test_groups_of_one_say_nothing() -> None:
    assert math.isnan(diversity.within_groups(torch.randn(3, 2), torch.arange(3)))

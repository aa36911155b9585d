"""The bootstrap against sums done by hand, and against distributions whose answer is known."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch

from gesso.formulas.intervals import clustered


def ones(n: int) -> torch.Tensor:
    return torch.ones(n)


def test_two_prompts_by_hand() -> None:
    """The draws are (a, a), (a, b), (b, a), (b, b): means 0, 2, 2, 4, so a spread of √2."""
    interval = clustered(torch.tensor([0.0, 4.0]), ones(2), draws=200_000)
    assert interval.mean == 2
    assert interval.error == pytest.approx(math.sqrt(2), rel=0.01)
    assert (interval.low, interval.high) == (0, 4)  # either end has a quarter of the draws


def test_three_uneven_prompts_by_hand() -> None:
    """All 27 draws of three prompts with 1, 2 and 3 samples, written out."""
    sums, counts = [1.0, 0.0, 3.0], [1.0, 2.0, 3.0]
    draws = list(itertools.product(range(3), repeat=3))
    means = [sum(sums[i] for i in d) / sum(counts[i] for i in d) for d in draws]
    interval = clustered(torch.tensor(sums), torch.tensor(counts), draws=200_000)
    assert interval.mean == pytest.approx(4 / 6)
    assert interval.error == pytest.approx(statistics.pstdev(means), rel=0.01)
    # 1/27 of the draws is (b, b, b): 0; 8/27 have no b: 1
    assert (interval.low, interval.high) == (0, 1)


def test_a_normal_sample_has_the_error_of_the_textbook() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    interval = clustered(values, ones(400))
    error = float(values.std()) / math.sqrt(400)
    assert interval.mean == pytest.approx(float(values.mean()))
    assert interval.error == pytest.approx(error, rel=0.05)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * error, rel=0.06)


def test_nineteen_of_twenty_intervals_hold_the_truth() -> None:
    generator = torch.Generator().manual_seed(2)
    held = 0
    for _ in range(400):  # exponential: skewed, mean 1
        values = -torch.rand(60, generator=generator).clamp(min=1e-9).log()
        interval = clustered(values, ones(60), draws=1000)
        held += interval.low <= 1 <= interval.high
    assert 0.90 <= held / 400 <= 0.98


def test_copies_of_a_sample_are_no_evidence() -> None:
    values = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    once, eight = clustered(values, ones(5)), clustered(8 * values, 8 * ones(5))
    assert once == eight


def test_intervals_without_a_value_and_of_one_prompt() -> None:
    assert math.isnan(clustered(torch.zeros(0), torch.zeros(0)).mean)
    one = clustered(torch.tensor([3.0]), torch.tensor([4.0]))
    assert one.mean == 0.75 and math.isnan(one.error) and math.isnan(one.low)
    gone = clustered(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([1.0, 0.0, 1.0]))
    assert gone == clustered(torch.tensor([1.0, 3.0]), ones(2))


def test_the_seed_decides_and_nothing_else() -> None:
    values = torch.arange(9.0)
    torch.manual_seed(5)
    first = clustered(values, ones(9), draws=500)
    torch.manual_seed(6)
    assert first == clustered(values, ones(9), draws=500)
    assert first != clustered(values, ones(9), draws=500, seed=1)

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from gesso.formulas.comparisons import mean_distances, mean_word_distances, win_rates

# 0 ≻ 1, 0 ≻ 2, 3 ≻ 0, 1 ? 2, 3 ≻ 1, 2 = 3
GOLDEN = [[0.5, 1, 1, 0], [0, 0.5, 0.5, 0], [0, 0.5, 0.5, 0.5], [1, 1, 0.5, 0.5]]


def test_the_golden_values_of_pref_grpo() -> None:
    rates = win_rates(np.array(GOLDEN)).round(3)
    assert rates.tolist() == [0.667, 0.167, 0.333, 0.833]
    values = torch.tensor(rates)
    advantages = (values - values.mean()) / (values.std() + 1e-8)
    expected = [0.549037, -1.094787, -0.549037, 1.094787]
    assert advantages.tolist() == pytest.approx(expected, abs=1e-6)


def test_win_rates_against_counting_games() -> None:
    """Each pair plays twice; Σ = G/2; the order of samples does not matter."""
    rng = random.Random(0)
    for size in (2, 3, 7):
        shown: np.ndarray = np.array(
            [[rng.choice((0, 0.5, 1)) for _ in range(size)] for _ in range(size)]
        )
        games = [[0.0, 0] for _ in range(size)]
        for i in range(size):
            for j in range(size):
                if i != j:
                    for player, points in ((i, shown[i, j]), (j, 1 - shown[i, j])):
                        games[player][0] += points
                        games[player][1] += 1
        rates = win_rates(shown)
        assert rates.tolist() == pytest.approx([points / n for points, n in games])
        assert rates.sum() == pytest.approx(size / 2)
        order = rng.sample(range(size), size)
        assert win_rates(shown[np.ix_(order, order)]).tolist() == pytest.approx(rates[order])


def test_a_judge_who_prefers_the_first_position_decides_nothing() -> None:
    assert win_rates(np.ones((5, 5))).tolist() == [0.5] * 5


def test_mean_distances_against_a_double_loop() -> None:
    x = np.random.default_rng(0).random((5, 7))
    expected = [
        sum(math.dist(a, b) / math.sqrt(7) for j, b in enumerate(x) if j != i) / 4
        for i, a in enumerate(x)
    ]
    assert mean_distances(x).tolist() == pytest.approx(expected)
    assert mean_distances(np.array([[0.0, 0], [1, 1], [0, 0]])).tolist() == [0.5, 1, 0.5]


def test_word_distances() -> None:
    values = mean_word_distances(["A cat", "a cat", "the dog", "a dog"])
    third = 1 - 1 / 3
    assert values == pytest.approx([(0 + 1 + third) / 3] * 2 + [(2 + third) / 3, 3 * third / 3])
    assert mean_word_distances(["", " "]) == [0.0, 0.0]

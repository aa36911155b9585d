"""Comparisons of the samples of one group, as rewards. G samples of one prompt. numpy, because
processes of rewards do not import torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def win_rates(first: np.ndarray) -> np.ndarray:
    """(G,): the share of the other samples that each one beats (Pref-GRPO, Wang et al. 2025).

    first[i, j] is the result of i when it is shown before j: 1 won, 0 lost, ½ for a tie or an
    answer that cannot be read. With p[i, j] = ½ (first[i, j] + 1 − first[j, i]) the rate is
    Σ_{j≠i} p[i, j] / (G − 1). The paper judges each pair in one order; both orders cancel a
    preference for a position. Rates are not rounded. Their sum is G/2.
    """
    result = (first + 1 - first.T) / 2  # (G, G)
    np.fill_diagonal(result, 0.0)
    return result.sum(1) / (len(result) - 1)


def mean_distances(x: np.ndarray) -> np.ndarray:
    """x: (G, F) → (G,): the mean over the others of sqrt(mean_f (x_i − x_j)²)."""
    distance = np.sqrt(np.square(x[:, None] - x[None, :]).mean(2))  # (G, G)
    return distance.sum(1) / (len(x) - 1)


def mean_word_distances(texts: Sequence[str]) -> list[float]:
    """The mean over the others of 1 − |A ∩ B| / |A ∪ B|, with A and B the sets of lower-case words;
    0 for two texts without words."""
    words = [frozenset(text.lower().split()) for text in texts]

    def distance(a: frozenset[str], b: frozenset[str]) -> float:
        return 1 - len(a & b) / len(a | b) if a | b else 0.0

    return [sum(distance(a, b) for b in words) / (len(words) - 1) for a in words]

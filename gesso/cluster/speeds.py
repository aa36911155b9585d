"""How long each worker takes for a sample, compared with the others."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

SLOW = 3.0
"""Below this ratio workers count as equally fast: if every measured difference changed who computes
what, the last bits on GPUs would change from run to run."""


class Speeds:
    def __init__(self, count: int) -> None:
        self._begin(count)

    def _begin(self, count: int) -> None:
        self._seconds = [0.0] * count
        self._samples = [0] * count

    def add(self, rank: int, seconds: float, samples: int) -> None:
        self._seconds[rank] += seconds
        self._samples[rank] += samples

    def slowness(self) -> list[float]:
        """Seconds per sample of each worker relative to the median since the last call; 1 for
        workers that did not sample."""
        each = [s / n if n else 0.0 for s, n in zip(self._seconds, self._samples, strict=True)]
        typical = median_low([s for s in each if s] or [1.0])
        self._begin(len(each))
        return [s / typical if s else 1.0 for s in each]


def metrics(slowness: Sequence[float]) -> dict[str, float]:
    slowest = max(slowness)
    return {"cluster/slowest": slowest, "cluster/slowest_rank": float(slowness.index(slowest))}


def dealt(slowness: Sequence[float]) -> list[float]:
    """The ratios by which work is divided."""
    return [ratio if ratio >= SLOW else 1.0 for ratio in slowness]

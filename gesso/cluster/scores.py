"""Metrics of a batch's scores."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gesso.types import Score


def reward_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """Reward metrics of a training batch."""
    means = {
        name if name == "reward" else f"reward/{name}": value
        for name, value in mean_scores(scores).items()
        if name != "failed"
    }
    values = [s.value for s in scores if s.ok and s.value is not None]
    best = max(values, default=float("nan"))
    return means | {
        "reward/std": statistics.pstdev(values) if values else float("nan"),
        "reward/max": best,
        "reward/at_max": values.count(best) / len(values) if values else float("nan"),
        "failed": float(len(scores) - len(values)),
    }


def mean_scores(scores: Sequence[Score]) -> dict[str, float]:
    """Mean reward and mean of each part, over the samples that have a score."""
    good = [s for s in scores if s.ok]
    if not good:
        return {"reward": float("nan"), "failed": float(len(scores))}
    names = dict.fromkeys(name for s in good for name in s.parts)
    parts = {n: statistics.fmean(s.parts[n] for s in good if n in s.parts) for n in names}
    value = statistics.fmean(s.value for s in good if s.value is not None)
    return {"reward": value, **parts, "failed": float(len(scores) - len(good))}

"""Reduces long series and lists to a limited number of items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any


def thin(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most `most` points: the last of each of equally long segments."""
    size = max(1, math.ceil(len(points) / most))
    return list(points[::-1][::size][::-1])


def thinned(points: Sequence[tuple[int, float]], most: int) -> dict[str, Any]:
    """Points as columns. More than `most` points are reduced to the means of equally long segments,
    with the minimum and maximum of each."""
    if len(points) <= most:
        return {"step": [s for s, _ in points], "y": [v for _, v in points]} if points else {}
    edges = [round(i * len(points) / most) for i in range(most + 1)]
    parts = [points[low:high] for low, high in pairwise(edges)]
    return {
        "step": [part[-1][0] for part in parts],
        "y": [fmean(v for _, v in part) for part in parts],
        "low": [min(v for _, v in part) for part in parts],
        "high": [max(v for _, v in part) for part in parts],
    }


def spread(items: Sequence[int], most: int) -> list[int]:
    """At most `most` evenly spaced items, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]

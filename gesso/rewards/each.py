"""Scores samples one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gesso.types import Sample, Score, UserError


def score_each(samples: Sequence[Sample], score: Callable[[Sample], Score]) -> list[Score]:
    """A UserError about a sample fails that sample, not the others."""
    return [_scored(sample, score) for sample in samples]


def _scored(sample: Sample, score: Callable[[Sample], Score]) -> Score:
    try:
        return score(sample)
    except UserError as error:
        return Score.failed(str(error))

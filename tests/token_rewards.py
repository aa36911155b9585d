"""Rewards of responses as users write them. Imported by worker processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from gesso.types import Sample, Score


def early(samples: Sequence[Sample]) -> list[float]:
    """The share of letters from the first half of the alphabet."""
    return [
        sum(c in "abcdefghijklm" for c in s.response) / max(1, len(s.response)) for s in samples
    ]


def held(samples: Sequence[Sample], folder: str) -> list[float]:
    """The same; writes a file when it begins, and goes on when there is no file `hold`."""
    Path(folder, "begun").touch()
    while Path(folder, "hold").exists():
        time.sleep(0.01)
    return early(samples)


def some_flat(samples: Sequence[Sample]) -> list[float]:
    """The same; but responses to a prompt that says so are all worth the same."""
    return [
        0.5 if "flat" in s.prompt.text else r for s, r in zip(samples, early(samples), strict=True)
    ]


def some_fail(samples: Sequence[Sample]) -> list[Score]:
    """Some of any prompt, all of one that says so."""
    values = zip(samples, some_flat(samples), strict=True)
    return [
        Score.failed("no answer") if s.seed % 7 == 1 or "fails" in s.prompt.text else Score(r)
        for s, r in values
    ]


def greedy_fails(samples: Sequence[Sample]) -> list[Score]:
    """Greedy responses have seed 0."""
    values = zip(samples, early(samples), strict=True)
    return [
        Score.failed("no answer") if s.seed == 0 and "bad" in s.prompt.text else Score(r)
        for s, r in values
    ]


def length(samples: Sequence[Sample]) -> list[float]:
    return [float(len(s.response)) for s in samples]

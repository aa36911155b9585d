"""Rewards that report how they were called, for the tests over HTTP and of the cache."""

from __future__ import annotations

import json
import os
import random as chance
import time
from collections.abc import Sequence

from gesso.types import Sample, Score, groupwise


def batch_size(samples: Sequence[Sample]) -> list[float]:
    time.sleep(0.1)
    return [float(len(samples))] * len(samples)


def echo(samples: Sequence[Sample]) -> list[Score]:
    """Everything that arrived, as text."""
    return [
        Score(
            1.0 if s.image is None else float(s.image.mean()),
            {"seed": float(s.seed % 1000)},
            json.dumps(
                [s.prompt.text, s.prompt.negative, s.prompt.columns, s.prompt.where, s.text]
            ),
        )
        for s in samples
    ]


def counted(samples: Sequence[Sample], log: str, seconds: float = 0.0) -> list[float]:
    """Writes one line to `log` for every sample."""
    with open(log, "a") as file:
        file.writelines(f"{int(s.pixels[0, 0, 0])}\n" for s in samples)
    time.sleep(seconds)
    return [float(s.pixels.mean()) / 255 for s in samples]


def fails_when_dark(samples: Sequence[Sample]) -> list[Score]:
    return [Score(1.0) if s.pixels.mean() > 9 else Score.failed("too dark") for s in samples]


def shown(samples: Sequence[Sample]) -> list[Score]:
    """Brightness of the prompt's first image; all images and messages as text."""
    import numpy as np

    return [
        Score(
            float(np.asarray(s.prompt.images[0].open()).mean()) if s.prompt.images else -1.0,
            {},
            json.dumps([[p.read().hex() for p in s.prompt.images], s.prompt.messages, s.text]),
        )
        for s in samples
    ]


def image_columns(samples: Sequence[Sample]) -> list[Score]:
    """The mask and the target image as text."""
    columns = [s.prompt.image_columns.items() for s in samples]
    return [Score(1.0, {}, json.dumps({k: i.read().hex() for k, i in c})) for c in columns]


def blind(samples: Sequence[Sample]) -> list[float]:
    """Counts the prompt's images without opening them."""
    return [float(len(s.prompt.images)) for s in samples]


def noisy(samples: Sequence[Sample]) -> list[float]:
    return [chance.random() for _ in samples]


noisy.random = True  # type: ignore[attr-defined]


class Noisy:
    random = True

    def score(self, samples: Sequence[Sample]) -> list[float]:
        return [chance.random() for _ in samples]


def quality(samples: Sequence[Sample]) -> list[float]:
    """From 1 to 5, like a quality model."""
    return [1 + 4 * float(s.pixels.mean()) / 255 for s in samples]


@groupwise
def place(samples: Sequence[Sample], log: str = "") -> list[Score]:
    """Groupwise: how many of the group are darker; the group's seeds as text."""
    means = [float(s.pixels.mean()) for s in samples]
    seeds = json.dumps([s.seed for s in samples])
    if log:
        with open(log, "a") as file:
            file.write(f"{seeds}\n")
    return [Score(sum(m < mean for m in means) / len(means), text=seeds) for mean in means]


class Longest:
    """Groupwise: 1 for the longest text of the group; a group with "die" kills the process."""

    def __init__(self, log: str = "") -> None:
        self.log = log

    def score_group(self, samples: Sequence[Sample]) -> list[Score | float]:
        if any(s.text == "die" for s in samples):
            os._exit(3)
        if any(s.text == "raise" for s in samples):
            raise RuntimeError("no such group")
        longest = max(len(s.response) for s in samples)
        return [
            Score.failed("empty") if not s.response else float(len(s.response) == longest)
            for s in samples
        ]

"""Custom rewards, some of them faulty. Imported by worker processes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gesso.types import Prompt, Sample, Score


def brightness(samples: Sequence[Sample], scale: float = 1.0) -> list[float]:
    return [scale * float(s.pixels.mean()) / 255 for s in samples]


def sees_everything(samples: Sequence[Sample]) -> list[Score]:
    print("a reward may print")
    return [
        Score(float(s.prompt.columns["bonus"]), {"seed": float(s.seed)}, s.prompt.negative)
        for s in samples
    ]


def raises(samples: Sequence[Sample]) -> list[float]:
    raise RuntimeError("no such model")


def not_finite(samples: Sequence[Sample]) -> list[float]:
    return [float("nan") if i == 0 else 1.0 for i in range(len(samples))]


def wrong_count(samples: Sequence[Sample]) -> list[float]:
    return [1.0] * (len(samples) + 1)


def dies(samples: Sequence[Sample]) -> list[float]:
    os._exit(1)


def dies_once(samples: Sequence[Sample], flag: str) -> list[float]:
    if not Path(flag).exists():
        Path(flag).touch()
        os._exit(1)
    return [1.0] * len(samples)


def hangs(samples: Sequence[Sample]) -> list[float]:
    time.sleep(600)
    return []


def slow_seeds(samples: Sequence[Sample]) -> list[float]:
    time.sleep(0.5)
    return [float(s.seed) for s in samples]


def some_fail(samples: Sequence[Sample]) -> list[Score]:
    return [Score.failed("too dark") if s.seed % 4 == 0 else Score(s.seed % 7 / 7) for s in samples]


def numpy_scores(samples: Sequence[Sample]) -> list[Score]:
    return [Score(s.pixels.mean(dtype="float32"), {"max": s.pixels.max()}) for s in samples]


def not_a_number(samples: Sequence[Sample]) -> list[str]:
    return ["good"] * len(samples)


def details_differ(samples: Sequence[Sample]) -> list[Score]:
    return [Score(1.0 * i, {"odd": 1.0} if i % 2 else {"even": 2.0}) for i in range(len(samples))]


def fails_on_training(samples: Sequence[Sample]) -> list[Score]:
    return [
        Score.failed("too dark") if s.prompt.where.startswith("train.txt") else Score(1.0)
        for s in samples
    ]


class OnlyScores:
    """The minimum: no `unfit`, no options, plain numbers."""

    def score(self, samples: Sequence[Sample]) -> list[float]:
        return [0.5] * len(samples)


class Stateful:
    """A class with options and `unfit`."""

    def __init__(self, word: str) -> None:
        self.word = word

    def unfit(self, prompt: Prompt) -> str | None:
        return None if self.word in prompt.text else f"does not mention {self.word}"

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [Score(float(s.prompt.text.count(self.word))) for s in samples]


def of_words(samples: Sequence[Sample], word: str) -> list[float | None]:
    """Applies only to prompts that contain `word`."""
    return [float(s.pixels.mean()) / 255 if word in s.prompt.text else None for s in samples]


def constant(samples: Sequence[Sample], value: float) -> list[float]:
    return [value] * len(samples)


class Heavy:
    """Logs the process that created it."""

    def __init__(self, log: str) -> None:
        with Path(log).open("a") as file:
            file.write(f"{os.getpid()}\n")

    def score(self, samples: Sequence[Sample]) -> list[float]:
        return [0.5 + 0.1 * (s.seed % 3) for s in samples]


class CannotBeMade:
    def __init__(self, parent: int) -> None:
        if os.getpid() != parent:
            raise RuntimeError("no room on the card")

    def score(self, samples: Sequence[Sample]) -> list[float]:
        return [1.0] * len(samples)


def poisoned(samples: Sequence[Sample]) -> list[float]:
    """Dies on one sample."""
    if any(s.seed == 13 for s in samples):
        os._exit(7)
    return [1.0] * len(samples)


def fails_later(samples: Sequence[Sample], flag: str, share: float = 1.0) -> list[float]:
    """Fails for `share` of the samples once the flag exists."""
    if not Path(flag).exists():
        return [0.1 * (s.seed % 7) for s in samples]
    return [float("nan") if s.seed % 100 < 100 * share else 0.1 * (s.seed % 7) for s in samples]


def odd_details(samples: Sequence[Sample]) -> list[Score]:
    wrong: Any = ["x"]
    nan = {"x": float("nan")}
    return [Score(1.0, nan), Score(1.0, wrong), Score(10**400), Score(1.0, text="\ud800")]


def threads(samples: Sequence[Sample]) -> list[float]:
    return [float(os.environ["OMP_NUM_THREADS"])] * len(samples)

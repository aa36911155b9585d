"""What a tracker is: a class that is made with a `Setup` and has `where`, `id`, `log`, `finish`.

It lives in a process of its own (`worker.py`), so it may block, print and raise as it likes, and it
reads what it logs from the run folder. A class of the user's own is named as "module:Name".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from gesso.config import Tracker as Settings
from gesso.track.samples import Shown


@dataclass(frozen=True)
class Setup:
    run: Path
    folder: Path  # for the tracker's own files; made already
    name: str  # of the run
    config: Mapping[str, Any]  # the resolved recipe
    settings: Settings
    id: str | None  # that the service gave the run in an earlier sitting


def file_name(tracker: str) -> str:
    """ "module:Name" or "folder/file.py:Name" as a part of a path."""
    return re.sub(r"[^\w.+-]+", ".", tracker).strip(".")


class Tracker(Protocol):
    id: str  # by which the run is found again when it is resumed
    where: str  # an address or a folder, for a person to look at

    def __init__(self, setup: Setup) -> None: ...

    def log(self, step: int, figures: Mapping[str, float], samples: Sequence[Shown]) -> None:
        """All that there is of one step; samples only after an evaluation."""

    def finish(self, ok: bool) -> None:
        """Everything is to be on disk or at the server when this returns."""


@dataclass(frozen=True)
class Logged:
    """All that there is of one step; samples only after an evaluation."""

    step: int
    figures: Mapping[str, float]
    samples: Sequence[Shown]


@runtime_checkable
class Batched(Protocol):
    """As Tracker, of a service that is slow by the call: it gets several rows in one where several
    are waiting, at most one of them with samples, and that the last."""

    id: str
    where: str

    def log_rows(self, rows: Sequence[Logged]) -> None: ...

    def finish(self, ok: bool) -> None: ...


def figures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row of metrics.jsonl, each with a group: "reward" is
    "train/reward", "eval/reward" stays."""
    numbers = {key: value for key, value in row.items() if isinstance(value, (int, float))}
    numbers["warnings"] = len(row.get("health", []))
    return {
        key if "/" in key else f"train/{key}": float(value)
        for key, value in numbers.items()
        if key != "step" and math.isfinite(value)
    }


def samples_of(run: Path, step: int) -> list[Shown]:
    """What the evaluation after `step` kept; nothing where there was none."""
    file = run / "samples" / f"{step:06d}.jsonl"
    if not file.is_file():
        return []
    rows = [Shown.of(json.loads(line)) for line in file.read_text("utf-8").splitlines()]
    return [row for row in rows if row is not None]


def picture(run: Path, name: str) -> str:
    """The path of a picture that a sample names."""
    return str(run / "samples" / name)


def score(sample: Shown) -> str:
    return f"no score: {sample.error}" if sample.reward is None else f"{sample.reward:.3f}"


def caption(sample: Shown) -> str:
    return f"{sample.prompt} | {score(sample)}"

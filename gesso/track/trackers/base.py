"""The tracker protocol: a class that is constructed with a `Setup` and has `where`, `id`, `log` and
`finish`.

It runs in a separate process (`worker.py`), so it may block, print and raise, and it gets what it
logs from the run folder. User-defined classes are given as "module:Name".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from gesso.config import Tracker as Settings
from gesso.track.samples import Shown, input_images
from gesso.types import PromptImage
from gesso.video_files import encode_gif, read_clip

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Setup:
    run: Path
    folder: Path  # for files of the tracker; exists already
    name: str  # of the run
    config: Mapping[str, Any]  # the resolved recipe
    settings: Settings
    id: str | None  # assigned by the service before the run was resumed


def file_name(tracker: str) -> str:
    """ "module:Name" or "folder/file.py:Name" as a path component."""
    return re.sub(r"[^\w.+-]+", ".", tracker).strip(".")


class Tracker(Protocol):
    id: str  # identifies the run when it is resumed
    where: str  # a URL or a folder, shown to the user

    def __init__(self, setup: Setup) -> None: ...

    def log(self, step: int, figures: Mapping[str, float], samples: Sequence[Shown]) -> None:
        """All data of one step; samples only after an evaluation."""

    def finish(self, ok: bool) -> None:
        """All data must be on disk or at the server when this returns."""


@dataclass(frozen=True)
class Logged:
    """All data of one step; samples only after an evaluation."""

    step: int
    figures: Mapping[str, float]
    samples: Sequence[Shown]


@runtime_checkable
class Batched(Protocol):
    """Like Tracker, for a service with slow calls: it gets all waiting rows in one call. Only the
    last of them may have samples."""

    id: str
    where: str

    def log_rows(self, rows: Sequence[Logged]) -> None: ...

    def finish(self, ok: bool) -> None: ...


def figures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row of metrics.jsonl, each with a group: "reward" becomes
    "train/reward", "eval/reward" is unchanged."""
    numbers = {key: value for key, value in row.items() if isinstance(value, (int, float))}
    numbers["warnings"] = len(row.get("health", []))
    return {
        key if "/" in key else f"train/{key}": float(value)
        for key, value in numbers.items()
        if key != "step" and math.isfinite(value)
    }


def samples_of(run: Path, step: int) -> list[Shown]:
    """Samples of the evaluation after `step`; empty if there was none."""
    file = run / "samples" / f"{step:06d}.jsonl"
    if not file.is_file():
        return []
    rows = [Shown.of(json.loads(line)) for line in file.read_text("utf-8").splitlines()]
    return [row for row in rows if row is not None]


def image_path(run: Path, name: str) -> str:
    """The path of an image or a video of a sample."""
    return str(run / "samples" / name)


def image_of(run: Path, sample: Shown) -> Image:
    """The image of a sample, or a strip of frames of a video; the input images of its prompt come
    first, at its height."""
    from PIL import Image

    result = PromptImage(image_path(run, sample.strip)).open()
    height, sources = result.height, input_images(run, sample)
    row = [i.resize((max(1, round(i.width * height / i.height)), height)) for i in sources]
    row.append(result)
    joined = Image.new("RGB", (sum(i.width for i in row), height))
    for k, image in enumerate(row):
        joined.paste(image, (sum(i.width for i in row[:k]), 0))
    return joined


def gif_of(run: Path, sample: Shown) -> bytes:
    """A video as GIF, for services that show images only."""
    return encode_gif(read_clip(image_path(run, sample.video)))


def score(sample: Shown) -> str:
    return f"no score: {sample.error}" if sample.reward is None else f"{sample.reward:.3f}"


def caption(sample: Shown) -> str:
    return f"{sample.prompt} | {score(sample)}"

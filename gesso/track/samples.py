"""A sample of an evaluation: a row of samples/000010.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso.track import media, older_names
from gesso.track.older_names import renamed
from gesso.types import PromptImage

if TYPE_CHECKING:
    from PIL.Image import Image

KEYS = {"index": int, "prompt": str, "seed": int, "image": str, "parts": dict, "text": str}
# Defaults for keys that rows of older versions lack.
ABSENT: dict[str, Any] = {
    "shown": [],
    "response": None,
    "answer": None,
    "reward": None,
    "error": None,
    "video": "",
    "fps": None,
}


@dataclass(frozen=True)
class Shown:
    """A row of samples/000010.jsonl."""

    index: int
    prompt: str
    seed: int
    image: str  # "" for language models; of a video its first frame
    shown: tuple[str, ...]  # files of the prompt's images
    response: str
    answer: str  # "" if there is none
    reward: float | None
    parts: Mapping[str, float]
    text: str  # text that a reward read or returned
    error: str
    video: str = ""  # "" for images and texts
    fps: float | None = None  # of a video

    @property
    def strip(self) -> str:
        """The file of some frames of the video side by side; of an image the image."""
        return self.image.removesuffix(".png") + media.STRIP if self.video else self.image

    @staticmethod
    def of(row: Mapping[str, Any]) -> Shown | None:
        """None if the row is damaged."""
        row = {**ABSENT, **renamed(row, older_names.SAMPLES)}
        names, parts, reward, answer = row["shown"], row.get("parts"), row["reward"], row["answer"]
        whole = all(isinstance(row.get(key), kind) for key, kind in KEYS.items())
        whole = whole and isinstance(names, list) and all(isinstance(n, str) for n in names)
        whole = whole and all(isinstance(v, (int, float)) for v in (parts or {}).values())
        whole = whole and (row["response"] is None or isinstance(row["response"], str))
        whole = whole and isinstance(row["video"], str)
        whole = whole and (not row["video"] or isinstance(row["fps"], (int, float)))
        if not whole or (not row["image"] and row["response"] is None):
            return None
        scored = isinstance(reward, (int, float)) and math.isfinite(reward)
        return Shown(
            row["index"],
            row["prompt"],
            row["seed"],
            row["image"],
            tuple(names),
            row["response"] or "",
            "" if answer is None else answer if isinstance(answer, str) else json.dumps(answer),
            float(reward) if scored else None,
            row["parts"],
            row["text"],
            "" if row["error"] is None else str(row["error"]),
            row["video"],
            row["fps"],
        )

    @cached_property
    def right(self) -> bool | None:
        """Whether the answer is correct; None if no reward determines this: there is neither a
        detail `exact` nor a reward that extracts an answer (which has a detail `answered`, and is
        at most 1)."""
        values = [value for name, value in self.parts.items() if name.endswith("/exact")]
        rewards = [n.removesuffix("/answered") for n in self.parts if n.endswith("/answered")]
        values = values or [self.parts[name] for name in rewards if name in self.parts]
        return any(value == 1 for value in values) if values else None


def input_images(run: Path, sample: Shown) -> list[Image]:
    """The input images of a sample's prompt; damaged files are skipped."""
    files = [run / "samples" / "prompts" / Path(name).name for name in sample.shown]
    images = [PromptImage(str(file)) for file in files]
    return [image.open() for image in images if image.fault() is None]

"""Run folders of any size without a run: the files that a run would write."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gesso.cluster.protocol import Batch
from gesso.track import groups
from gesso.track.run_folder import RunFolder
from gesso.types import Prompt, PromptImage, Sample, Score

CONFIG: dict[str, Any] = {
    "about": "writes words",
    "seed": 3,
    "steps": 10,
    "model": {"name": "sd3", "path": "zoo:signs"},
    "data": {"groups": 4},
    "algorithm": {"name": "flow-grpo", "group": 6},
}


def row(step: int, **more: Any) -> dict[str, Any]:
    """Of metrics.jsonl; row 0 has the evaluation only."""
    made: dict[str, Any] = {"step": step, "time/step": 2.0, "time/total": 2.0 * (step + 1)}
    if step:
        made |= {"reward": step / 10, "reward/ocr": step / 10, "samples_per_s": 12.0}
    return made | {"health": []} | more


def make(path: Path, steps: int, **config: Any) -> RunFolder:
    """A run of so many steps so far."""
    run = RunFolder.create(path, CONFIG | config)
    for step in range(steps + 1):
        held_out = {"eval/reward": 0.3 + step / 20} if step % 2 == 0 else {}
        run.append(row(step, **held_out))
    return run


def picture(shade: int, height: int = 8, width: int = 24) -> np.ndarray:
    return np.full((height, width, 3), shade, np.uint8)


def video(shade: int, frames: int = 8) -> np.ndarray:
    """(frames, 32, 96, 3): a bar that moves to the right."""
    made = np.stack([picture(shade, 32, 96) for _ in range(frames)])
    for i, frame in enumerate(made):
        frame[:, 8 * i : 8 * i + 8] = 250
    return made


def source(shade: int, height: int = 8, width: int = 24) -> PromptImage:
    data = io.BytesIO()
    Image.fromarray(picture(shade, height, width)).save(data, "PNG")
    return PromptImage(data=data.getvalue())


def evaluate(run: RunFolder, step: int, prompts: list[str], shade: int = 100) -> None:
    """What an evaluation of a model that draws leaves."""
    samples = [Sample(Prompt(text), picture(shade + i), 7 + i) for i, text in enumerate(prompts)]
    scores = [Score(value=step / 10, parts={"ocr": step / 10}, text="READ") for _ in prompts]
    run.save_samples(step, samples, scores)


def batch(
    run: RunFolder,
    step: int,
    advantages: list[float],
    keep: int = 4,
    images: tuple[PromptImage, ...] = (),
) -> None:
    """Groups of two, of a training step; `images` of every prompt."""
    rows = range(len(advantages))
    prompts = [Prompt(f"prompt {i // 2}", images=images) for i in rows]
    samples = [Sample(prompt, picture(10 * i), i) for i, prompt in enumerate(prompts)]
    scores = [Score(value=abs(a), parts={"ocr": abs(a)}) for a in advantages]
    drawn = Batch(step - 1, 0, samples, scores, [i // 2 for i in rows], metrics={}, notes=[])
    groups.save(run.path, step, drawn, advantages, keep)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def open_picture(path: Path) -> Image.Image:
    with Image.open(path) as opened:
        return opened.convert("RGB")

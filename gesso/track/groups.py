"""The groups of one training step, and their contributions to the gradient.

groups/000010.jsonl      one row per group of the batch of step 10, the largest share first
groups/000010/003-07.webp    sample 7 of group 3, downscaled; of a video its first frame
groups/000010/003-07.mp4     the video
groups/000010/003-shown-1.webp    prompt image of a vision-language model

A sample's share is |its advantage| / Σ |advantages| of the batch: on-policy that is its weight in
the policy gradient. Rows of all groups have the values; the first few also have images or
responses.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gesso.track import media
from gesso.track.atomic import write_atomic
from gesso.types import Sample, Score

if TYPE_CHECKING:
    from PIL import Image

    from gesso.config import Recipe


class ScoredSamples(Protocol):
    """The samples of a batch, their scores, and the index of each sample's group."""

    @property
    def samples(self) -> Sequence[Sample]: ...

    @property
    def scores(self) -> Sequence[Score]: ...

    @property
    def group(self) -> Sequence[int]: ...


MAX_SIZE = 256  # px: larger images are downscaled to this size


def saved(recipe: Recipe, step: int) -> bool:
    """Whether the groups of batch `step`, counted from 0, are saved: before an evaluation."""
    return recipe.save.groups > 0 and (step == 0 or recipe.evaluates(step + 1))


def needed(recipe: Recipe, step: int) -> Callable[[Sample], Sample]:
    """What remains of a sample of batch `step` once it is scored: the driver's memory must not grow
    with the size of images."""
    if not saved(recipe, step):
        return media.without_image
    return (lambda sample: sample) if recipe.save.group_images == "full" else _small


def _small(sample: Sample) -> Sample:
    if sample.image is None or sample.is_video:
        return media.smaller(sample, MAX_SIZE)
    import numpy as np

    image = media.still(sample)
    image.thumbnail((MAX_SIZE, MAX_SIZE))  # as `_save`, which then leaves it
    return replace(sample, image=np.asarray(image))


def save(
    run: Path,
    step: int,
    batch: ScoredSamples,
    advantages: Sequence[float],
    keep: int,
    full: bool = False,
) -> None:
    """`advantages`: one per sample. `keep`: number of groups with images or responses. `full`:
    images are saved without loss instead of downscaled, videos at their size."""
    import torch

    folder = run / "groups" / f"{step:06d}"
    folder.parent.mkdir(exist_ok=True)
    size = torch.tensor(advantages).abs()
    shares = (size / size.sum().clamp(min=1e-12)).tolist()
    members: dict[int, list[int]] = {}
    for i, group in enumerate(batch.group):
        members.setdefault(group, []).append(i)
    order = sorted(members, key=lambda g: -sum(shares[i] for i in members[g]))
    lines = []
    for rank, group in enumerate(order):
        rows = members[group]
        row = _group(group, rows, batch, advantages, shares)
        if rank < keep:
            _keep(folder, row, [batch.samples[i] for i in rows], full)
        lines.append(json.dumps(row) + "\n")
    write_atomic(folder.with_suffix(".jsonl"), "".join(lines).encode())


def _group(
    group: int,
    rows: Sequence[int],
    batch: ScoredSamples,
    advantages: Sequence[float],
    shares: Sequence[float],
) -> dict[str, Any]:
    prompt = batch.samples[rows[0]].prompt
    scores = [batch.scores[i] for i in rows]
    values = [score.value for score in scores if score.value is not None]
    return {
        "group": group,
        "prompt": prompt.text,
        "answer": prompt.columns.get("answer"),
        "share": sum(shares[i] for i in rows),
        "mean": statistics.fmean(values),
        "std": statistics.pstdev(values),
        "samples": [
            {
                "reward": score.value,
                "parts": dict(score.parts),
                "text": score.text,
                "advantage": advantages[i],
                "share": shares[i],
            }
            for i, score in zip(rows, scores, strict=True)
        ],
    }


def _keep(folder: Path, row: dict[str, Any], samples: Sequence[Sample], full: bool) -> None:
    folder.mkdir(exist_ok=True)
    prompt = samples[0].prompt
    if prompt.messages:
        row["messages"] = prompt.messages
    for k, image in enumerate(prompt.images, 1):
        name = f"{folder.name}/{row['group']:03d}-shown-{k}.webp"
        _save(image.open(), folder.parent / name, full)
        row.setdefault("shown", []).append(name)
    for k, (entry, sample) in enumerate(zip(row["samples"], samples, strict=True)):
        if sample.image is not None:
            entry["image"] = f"{folder.name}/{row['group']:03d}-{k:02d}.webp"
            file = folder.parent / entry["image"]
            _save(media.still(sample), file, full)
            if sample.is_video:
                small = sample if full else media.smaller(sample, MAX_SIZE)
                video = media.save_video(small, file.with_suffix(media.VIDEO))
                entry |= {"video": f"{folder.name}/{video.name}", "fps": sample.fps}
        else:
            entry["response"] = sample.text


def _save(image: Image.Image, file: Path, full: bool) -> None:
    image = image.convert("RGB")
    if full:
        return image.save(file, lossless=True)
    image.thumbnail((MAX_SIZE, MAX_SIZE))
    image.save(file, quality=90)

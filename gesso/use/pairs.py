"""`gesso data pairs`: preferences from the scored samples that a run keeps.

A run keeps the samples of some groups (`save.groups`) before each evaluation. The best and the
worst sample of a group become a pair, in a file that offline DPO and SFT read as `data.train`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gesso.config import AnyModel, Model
from gesso.track.atomic import write_atomic
from gesso.track.run_folder import RunFolder, must_be_possible
from gesso.types import UserError
from gesso.use.source import recipe_of

SUFFIX = ".jsonl"
FILES = ("image", "video")  # keys of a group's samples with the name of a file


@dataclass(frozen=True)
class Group:
    """A group whose samples the run has kept."""

    step: int
    prompt: str | list[Any]  # a text or messages
    answer: Any
    images: Sequence[str]  # files of the prompt's images, relative to the run
    samples: Sequence[tuple[float, str]]  # reward; a text, or a file relative to the run


@dataclass(frozen=True)
class Result:
    file: Path
    pairs: int
    notes: Sequence[str]


def write(folder: Path, out: Path | None, min_gap: float) -> Result:
    run = RunFolder.open(folder)
    recipe = recipe_of(run)
    file = run.path / f"pairs{SUFFIX}" if out is None else out
    _check(file, min_gap)
    if recipe.sampler.engine == "data":
        raise UserError(
            f"{run.path} trained on samples of its data, which have no scores; data pairs expects "
            "a run that generated its samples"
        )
    key = _key(recipe.model)
    kept = _groups(run.path, key)
    if not kept:
        raise UserError(
            f"{run.path} has kept no samples of its training groups; train with save.groups of at "
            "least 1"
        )
    rows = [row for group in kept if (row := _pair(group, min_gap, run.path, file, key))]
    apart = f"differ by {min_gap:g} or more" if min_gap else "differ"
    if not rows:
        raise UserError(
            f"{run.path}: in none of its {len(kept)} kept groups do the rewards {apart}; "
            f"{'lower --min-gap, or ' if min_gap else ''}keep more groups with save.groups"
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, "".join(json.dumps(row) + "\n" for row in rows).encode())
    except OSError as error:
        raise UserError(f"--out {file} cannot be written: {error}") from error
    notes = [
        f"from {len(kept)} groups: a run keeps the samples of save.groups = {recipe.save.groups} "
        "groups before each evaluation, not of the others"
    ]
    if len(rows) < len(kept):
        notes.append(f"{len(kept) - len(rows)} groups are left out: their rewards do not {apart}")
    if recipe.save.group_images == "small" and (key in FILES or any(g.images for g in kept)):
        notes.append(
            "images and videos are compressed and have at most 256 pixels per side; "
            'train with save.group_images = "full" to keep their size'
        )
    if recipe.data.template is not None:
        notes.append("the prompts contain data.template; leave it out when training on them")
    return Result(file, len(rows), notes)


def _check(file: Path, min_gap: float) -> None:
    if file.suffix != SUFFIX:
        raise UserError(f"data pairs expects --out with a name that ends in {SUFFIX}, got {file}")
    if file.exists():
        raise UserError(f"{file} already exists; choose another file with --out, or remove it")
    must_be_possible(file.parent, "folder")
    if not 0 <= min_gap < float("inf"):
        raise UserError(f"data pairs expects --min-gap of at least 0, got {min_gap:g}")


def _key(section: AnyModel) -> str:
    """Key of a sample in a row of groups/000010.jsonl."""
    video = isinstance(section, Model) and section.frames > 1
    return "video" if video else "image" if section.output == "image" else "response"


def _groups(run: Path, key: str) -> list[Group]:
    """The groups with samples, in order of steps."""
    kept = []
    for file in sorted((run / "groups").glob(f"*{SUFFIX}")):
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
            try:
                group = _group(int(file.stem), json.loads(line), key)
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{file}, line {number} is damaged: {error!r}; delete that line"
                ) from error
            kept += [] if group is None else [group]
    return kept


def _group(step: int, row: Mapping[str, Any], key: str) -> Group | None:
    """None if the run has not kept its samples."""
    samples = [
        (float(entry["reward"]), f"groups/{entry[key]}" if key in FILES else entry[key])
        for entry in row["samples"]
        if key in entry and entry["reward"] is not None
    ]
    if not samples:
        return None
    images = [f"groups/{name}" for name in row.get("shown", [])]
    prompt = row.get("messages") or row["prompt"]
    return Group(step, prompt, row["answer"], images, samples)


def _pair(group: Group, min_gap: float, run: Path, file: Path, key: str) -> dict[str, Any] | None:
    """None without a preference."""
    best, worst = (pick(group.samples, key=lambda sample: sample[0]) for pick in (max, min))
    if best[0] <= worst[0] or best[0] - worst[0] < min_gap:
        return None

    def path(name: str) -> str:
        return Path(os.path.relpath(run / name, file.parent)).as_posix()

    row: dict[str, Any] = {"prompt": group.prompt}
    if group.images:
        row["images"] = [path(name) for name in group.images]
    row["chosen"], row["rejected"] = (path(s) if key in FILES else s for _, s in (best, worst))
    row |= {"chosen_score": best[0], "rejected_score": worst[0], "step": group.step}
    return row if group.answer is None else row | {"answer": group.answer}

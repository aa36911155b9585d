"""Finds the files of a split in a folder.

train.txt, train_metadata.jsonl     one file per split, as in Flow-GRPO
train-00000-of-00003.parquet, …     shards of a split, as on the hub; a hash may follow the number
data/…                              the same in a subfolder `data`, as on the hub
train/, test/                       saved to disk by `datasets`, listed in dataset_dict.json
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gesso.types import UserError

FILES = (".txt", ".jsonl", ".json", ".parquet")
SHARD = re.compile(r"(?P<split>.+)-(?P<number>\d+)-of-(?P<count>\d+)(-\w+)?")
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")  # hub metadata without rows
DATA = "data"
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True)
class Split:
    """A file, its shards in order, or a folder saved by `datasets`."""

    paths: Sequence[Path]
    count: int = 1  # of shards, according to their names

    def shown(self, folder: Path) -> str:
        more = len(self.paths) - 1
        first = self.paths[0].relative_to(folder).as_posix()
        return f"{first} with {more} more" if more else first


def is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def captioned(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """The images or clips of a folder in which text files of the same names contain their prompts.
    Empty for any other folder."""
    if not folder.is_dir():
        return []
    files = [f for f in sorted(folder.iterdir()) if f.is_file() and not f.name.startswith(".")]
    images = [file for file in files if file.suffix.lower() in suffixes]
    return images if any(image.with_suffix(".txt").is_file() for image in images) else []


def pick(folder: Path, split: str, path: str) -> Split:
    """The split of that name, or the only one for "". `path` is the recipe's value, for errors."""
    splits = _splits(folder)
    if not splits:
        raise UserError(f"prompt folder {path} contains no prompts; {_hint(folder)}")
    if not split and len(splits) == 1:
        (split,) = splits
    if split not in splits:
        problem = f'no split "{split}"' if split else "no split given"
        known = ", ".join(f"{folder}@{name}" for name in splits)
        raise UserError(f"prompt folder {path}: {problem}; choose one of {known}")
    if len(splits[split]) > 1:
        names = " and ".join(each.shown(folder) for each in splits[split])
        raise UserError(
            f'prompt folder {path}: split "{split}" is ambiguous: {names}; give the path of the '
            "file, or remove all but one"
        )
    (chosen,) = splits[split]
    _check_complete(chosen, split, path)
    return chosen


def _splits(folder: Path) -> dict[str, list[Split]]:
    """Splits by name; a name with several entries is ambiguous."""
    saved = folder / "dataset_dict.json"
    if saved.is_file():
        return {name: [Split([folder / name])] for name in json.loads(saved.read_text())["splits"]}
    splits: dict[str, list[Split]] = {}
    for parent in (folder, folder / DATA):
        for name, split in _of_files(parent):
            splits.setdefault(name, []).append(split)
    return splits


def _of_files(folder: Path) -> list[tuple[str, Split]]:
    single: list[tuple[str, Split]] = []
    shards: dict[tuple[str, int, str], list[tuple[int, Path]]] = {}
    for file in _readable(folder):
        shard = SHARD.fullmatch(file.stem)
        if shard is None:
            single.append((file.stem.removesuffix("_metadata"), Split([file])))
        else:
            key = shard["split"], int(shard["count"]), file.suffix
            shards.setdefault(key, []).append((int(shard["number"]), file))
    joined = [
        (split, Split([file for _, file in sorted(files)], count))
        for (split, count, _), files in shards.items()
    ]
    return single + joined


def _readable(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [
        file
        for file in sorted(folder.iterdir())
        if file.is_file()
        and file.suffix in FILES
        and file.name not in DESCRIPTIONS
        and not file.name.startswith(".")
    ]


def _check_complete(chosen: Split, split: str, path: str) -> None:
    """Raises unless every shard is present exactly once, e.g. after an incomplete download."""
    numbers = [int(m["number"]) for p in chosen.paths if (m := SHARD.fullmatch(p.stem))]
    if not numbers or numbers == list(range(chosen.count)):
        return
    twice = [p.name for p, n in zip(chosen.paths, numbers, strict=True) if numbers.count(n) > 1]
    if twice:
        raise UserError(
            f'prompt folder {path}: split "{split}" has one shard twice, {twice[0]} and '
            f"{twice[1]}; remove one of them"
        )
    missing = sorted(set(range(chosen.count)) - set(numbers))
    if not missing:
        raise UserError(
            f'prompt folder {path}: split "{split}" has {chosen.count} shards, but the number of '
            f"{chosen.paths[-1].name} is out of range; remove it"
        )
    raise UserError(
        f'prompt folder {path}: split "{split}" has {len(numbers)} of {chosen.count} shards; the '
        f"first missing shard is number {missing[0]:05d}; download it again"
    )


def _hint(folder: Path) -> str:
    """Describes what the folder should contain, or names the subfolders that have splits."""
    subfolders = sorted(each.name for each in folder.iterdir() if each.is_dir() and _splits(each))
    if subfolders:
        names = ", ".join(subfolders)
        return f"its subfolders do: {names}; give one of them, e.g. {folder / subfolders[0]}"
    return (
        "expected files such as train.txt, train_metadata.jsonl, train.parquet or "
        "train-00000-of-00003.parquet, or a dataset saved by `datasets`"
    )

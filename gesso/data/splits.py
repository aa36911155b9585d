"""Which files of a folder are which split.

train.txt, train_metadata.jsonl     one file a split, as Flow-GRPO has them
train-00000-of-00003.parquet, …     shards of one, as the hub has them; a hash may follow the number
data/…                              the same within a folder `data`, where the hub puts them
train/, test/                       of what `datasets` saved on disk, by its dataset_dict.json
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
ABOUT = ("dataset_info.json", "dataset_infos.json")  # of the hub: they describe the data
DATA = "data"


@dataclass(frozen=True)
class Split:
    """What holds one split: a file, its shards in order, or a folder that `datasets` saved."""

    places: Sequence[Path]
    count: int = 1  # of shards, by their own names

    def shown(self, folder: Path) -> str:
        more = len(self.places) - 1
        first = self.places[0].relative_to(folder).as_posix()
        return f"{first} with {more} more" if more else first


def is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def pick(folder: Path, split: str, path: str) -> Split:
    """The split of that name; "": the only one. `path` is what the recipe says."""
    found = _splits(folder)
    if not found:
        raise UserError(f"prompt folder {path} holds no prompts; {_instead(folder)}")
    if not split and len(found) == 1:
        (split,) = found
    if split not in found:
        told = f'no split "{split}"' if split else "a folder without a split"
        known = ", ".join(f"{folder}@{name}" for name in found)
        raise UserError(f"prompt folder {path}: {told}; say which: {known}")
    if len(found[split]) > 1:
        names = " and ".join(each.shown(folder) for each in found[split])
        raise UserError(
            f'prompt folder {path}: "{split}" may be {names}; give the file\'s path, or leave only '
            "one of them there"
        )
    (chosen,) = found[split]
    _check_complete(chosen, split, path)
    return chosen


def _splits(folder: Path) -> dict[str, list[Split]]:
    """By name; several of one name where it is not clear which is meant."""
    saved = folder / "dataset_dict.json"
    if saved.is_file():
        return {name: [Split([folder / name])] for name in json.loads(saved.read_text())["splits"]}
    found: dict[str, list[Split]] = {}
    for place in (folder, folder / DATA):
        for name, split in _of_files(place):
            found.setdefault(name, []).append(split)
    return found


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
        and file.name not in ABOUT
        and not file.name.startswith(".")
    ]


def _check_complete(chosen: Split, split: str, path: str) -> None:
    """Every shard once: a download that broke off must not train on a part unnoticed."""
    numbers = [int(m["number"]) for p in chosen.places if (m := SHARD.fullmatch(p.stem))]
    if not numbers or numbers == list(range(chosen.count)):
        return
    twice = [p.name for p, n in zip(chosen.places, numbers, strict=True) if numbers.count(n) > 1]
    if twice:
        raise UserError(
            f'prompt folder {path}: "{split}" has one shard twice, {twice[0]} and {twice[1]}; '
            "leave one of them there"
        )
    missing = sorted(set(range(chosen.count)) - set(numbers))
    if not missing:
        raise UserError(
            f'prompt folder {path}: "{split}" has {chosen.count} shards, but '
            f"{chosen.places[-1].name} is beyond them; remove it"
        )
    raise UserError(
        f'prompt folder {path}: "{split}" has {len(numbers)} of {chosen.count} shards, the first '
        f"that is missing is number {missing[0]:05d}; download it again"
    )


def _instead(folder: Path) -> str:
    """What was expected, or where there are some."""
    within = sorted(each.name for each in folder.iterdir() if each.is_dir() and _splits(each))
    if within:
        return f"those in it do: {', '.join(within)}; give one of them, as {folder / within[0]}"
    return (
        "expected files such as train.txt, train_metadata.jsonl, train.parquet or "
        "train-00000-of-00003.parquet, or a dataset saved by `datasets`"
    )

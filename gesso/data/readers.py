"""The prompt files users already have → Prompt.

prompts.txt              a prompt a line
prompts.jsonl            an object a line; GenEval's metadata as it is
prompts.json             a list of objects, or {"data": a list}
prompts.parquet          extra `data`
file@train               the file: `datasets` calls what it holds "train"
folder@split             Flow-GRPO's layout, `split.txt` or `split_metadata.jsonl`; or what
                         `datasets` saved on disk, extra `data`
hub:owner/name@split     a dataset of the Hugging Face hub, `hub:owner/name/subset@split` one of
                         its subsets, extra `data`
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gesso.config import Source, resolve_path
from gesso.data.chat import PLAIN, Form
from gesso.data.pictures import Unsound, faults, first_line, short
from gesso.data.rows import Row, prompt_of
from gesso.types import Prompt, UserError

HUB = "hub:"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?")  # as owner/name@split
FILES = (".txt", ".jsonl", ".json", ".parquet")
BATCH = 256  # rows of a table at a time

Rows = Iterable[tuple[int, Row]]  # numbered from 1, as editors do


@dataclass(frozen=True)
class Reading:
    prompts: list[Prompt]
    left_out: list[str]  # "geo3k.parquet:17: why", one for each row that cannot be used


def read(source: Source, form: Form = PLAIN) -> Reading:
    """Every row of a source, its pictures found and decoded once. `source.column` becomes the
    prompt's text and "negative_prompt" its negative; all other columns go along to the rewards."""
    rows, name, folder = _rows(source)
    made: list[Prompt | str] = []
    for i, row in rows:
        where = f"{name}:{i}"
        try:
            made.append(prompt_of(row, where, source, folder, form))
        except Unsound as error:
            made.append(f"{where}: {error}")
    if not made:
        raise UserError(f"prompt file {source.path} is empty; it needs a row for each prompt")
    found = [prompt for prompt in made if isinstance(prompt, Prompt)]
    torn = {p.where: why for p, why in zip(found, faults(found), strict=True) if why}
    left_out = [
        row if isinstance(row, str) else f"{row.where}: {torn[row.where]}"
        for row in made
        if isinstance(row, str) or row.where in torn
    ]
    return Reading([prompt for prompt in found if prompt.where not in torn], left_out)


def _rows(source: Source) -> tuple[Rows, str, Path | None]:
    """The rows, their name in messages, and the folder that pictures are looked for in."""
    if source.path.startswith(HUB):
        name = source.path.removeprefix(HUB)
        return enumerate(_hub_rows(name, source), 1), name, None
    place, name = _locate(source.path)
    if place.is_dir():
        return enumerate(_saved_rows(place, source), 1), name, place
    readers = {".txt": _text_rows, ".jsonl": _line_rows, ".json": _json_rows}
    if place.suffix in readers:
        return readers[place.suffix](place, name, source), name, place.parent
    return enumerate(_parquet_rows(place, source), 1), name, place.parent


def _locate(path: str) -> tuple[Path, str]:
    """The file or saved dataset behind `path` or `folder@split`, and its name in messages."""
    place, split = resolve_path(path), ""
    if not place.exists() and "@" in path:  # a path that has an @ of its own is taken as it is
        folder, _, split = path.rpartition("@")
        place = resolve_path(folder)
    if not place.exists():
        hint = f'; a dataset of the hub is "{HUB}{path}"' if HUB_NAME.fullmatch(path) else ""
        raise UserError(f"prompt file {path}: no such file{hint}")
    if place.is_file() and split not in ("", "train"):
        raise UserError(
            f"prompt file {path}: {place.name} is one file, which is @train or nothing; "
            f"leave out @{split}"
        )
    if _is_saved(place) and not split:
        return place, place.name
    name = place.name
    if place.is_dir():
        place = _pick(place, split, path)
        name = f"{name}/{place.name}"
    if place.is_file() and place.suffix not in FILES:
        raise UserError(
            f"prompt file {path}: expected .txt, .jsonl, .json or .parquet, "
            f"found {place.suffix or 'no ending'}"
        )
    return place, name


def _is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def _pick(folder: Path, split: str, path: str) -> Path:
    splits = _splits(folder)
    if not splits:
        raise UserError(
            f"prompt folder {path} holds no prompts; expected files such as train.txt, "
            "train_metadata.jsonl or train.parquet, or a dataset saved by `datasets`"
        )
    if split not in splits:
        found = f'no split "{split}"' if split else "a folder without a split"
        known = ", ".join(f"{folder}@{name}" for name in splits)
        raise UserError(f"prompt folder {path}: {found}; say which: {known}")
    if len(splits[split]) > 1:
        names = " and ".join(file.name for file in splits[split])
        raise UserError(f'prompt folder {path}: "{split}" may be {names}; give the file\'s path')
    return splits[split][0]


def _splits(folder: Path) -> dict[str, list[Path]]:
    saved = folder / "dataset_dict.json"
    if saved.is_file():
        return {name: [folder / name] for name in json.loads(saved.read_text())["splits"]}
    found: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.suffix in FILES:
            found.setdefault(file.stem.removesuffix("_metadata"), []).append(file)
    return found


def _text(file: Path, path: str) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"prompt file {path} is not UTF-8 text: {error}") from error


def _lines(file: Path, path: str) -> list[tuple[int, str]]:
    lines = _text(file, path).split("\n")
    return [(i, line) for i, line in enumerate(lines, 1) if line.strip()]


def _text_rows(file: Path, name: str, source: Source) -> Rows:
    if source.column not in (None, "prompt") or source.images or source.drop:
        raise UserError(
            f"prompt file {source.path} has no columns; leave out `column`, `images` and `drop`"
        )
    return [(i, {"prompt": line.strip()}) for i, line in _lines(file, source.path)]


def _line_rows(file: Path, name: str, source: Source) -> Rows:
    found = []
    for i, line in _lines(file, source.path):
        try:
            found.append((i, json.loads(line)))
        except json.JSONDecodeError as error:
            raise UserError(f"{name}:{i}: not JSON: {error}") from error
    return _objects(found, name, source)


def _json_rows(file: Path, name: str, source: Source) -> Rows:
    """A list, {"data": a list}, or, as `datasets` has it, an object a line."""
    try:
        found = json.loads(_text(file, source.path))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return _line_rows(file, name, source)
        raise UserError(f"prompt file {source.path} is not JSON: {error}") from error
    if isinstance(found, dict) and "data" in found:
        found = found["data"]
    if not isinstance(found, list):
        raise UserError(
            f'prompt file {source.path}: expected a list [{{…}}, …] or {{"data": [{{…}}, …]}}, '
            f"got {short(found)}"
        )
    return _objects(list(enumerate(found, 1)), name, source)


def _objects(found: Sequence[tuple[int, Any]], name: str, source: Source) -> Rows:
    for i, row in found:
        if not isinstance(row, dict):
            raise UserError(f"{name}:{i}: expected an object as {{…}}, got {json.dumps(row)[:60]}")
    _check_columns(source, {key for _, row in found for key in row})
    return [(i, {k: v for k, v in row.items() if k not in source.drop}) for i, row in found]


def _check_columns(source: Source, known: Collection[str]) -> None:
    """What the recipe says of columns must be there to be said."""
    wanted = [(name, "to drop") for name in source.drop]
    wanted += [(source.images, "of pictures")] if source.images else []
    for name, role in wanted:
        if name not in known:
            raise UserError(
                f'{source.path} has no column "{name}" {role}; it has {", ".join(sorted(known))}'
            )


def _extra(module: str, path: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(f'{path} needs {package}: pip install "gesso[data]"') from error


def _parquet_rows(file: Path, source: Source) -> Iterator[Row]:
    """Batch by batch, so that pictures are not held twice; dropped columns are never read."""
    parquet = _extra("pyarrow.parquet", source.path)
    try:
        with parquet.ParquetFile(file) as opened:
            known = opened.schema_arrow.names
            _check_columns(source, known)
            kept = [name for name in known if name not in source.drop]
            for batch in opened.iter_batches(BATCH, columns=kept):
                yield from batch.to_pylist()
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"prompt file {source.path} cannot be read: {first_line(error)}") from error


def _saved_rows(folder: Path, source: Source) -> Iterator[Row]:
    datasets = _extra("datasets", source.path)
    try:
        found = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise UserError(f"dataset {source.path} cannot be read: {first_line(error)}") from error
    return _dataset_rows(found, source)


def _hub_rows(name: str, source: Source) -> Iterator[Row]:
    repository, _, split = name.partition("@")
    owner, *rest = repository.split("/")
    if not split or not owner or not all(rest) or len(rest) > 2:
        raise UserError(f"{source.path}: expected hub:owner/name@split, as hub:me/signs@train")
    subset = rest[1] if len(rest) == 2 else None
    datasets = _extra("datasets", source.path)
    try:
        found = datasets.load_dataset("/".join([owner, *rest[:1]]), subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{source.path} cannot be loaded: {first_line(error)}; check name, split and network"
        ) from error
    return _dataset_rows(found, source)


def _dataset_rows(dataset: Any, source: Source) -> Iterator[Row]:
    """Through pyarrow: nothing is decoded into tensors or pictures on the way."""
    _check_columns(source, dataset.column_names)
    tables = dataset.remove_columns(source.drop).with_format("arrow")
    for table in tables.iter(BATCH):
        yield from table.to_pylist()

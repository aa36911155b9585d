"""The prompt files users already have → Prompt.

prompts.txt              a prompt a line
prompts.jsonl            an object a line; GenEval's metadata as it is
prompts.parquet          extra `data`
folder@split             Flow-GRPO's layout, `split.txt` or `split_metadata.jsonl`; or what
                         `datasets` saved on disk, extra `data`
hub:owner/name@split     a dataset of the Hugging Face hub, `hub:owner/name/subset@split` one of
                         its subsets, extra `data`
"""

from __future__ import annotations

import datetime
import decimal
import importlib
import json
import math
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from gesso.config import Source, resolve_path
from gesso.types import Prompt, UserError

HUB = "hub:"
FILES = (".txt", ".jsonl", ".parquet")

Row = dict[str, Any]
Rows = Iterable[tuple[int, Row]]  # numbered from 1, as editors do


def read(source: Source) -> list[Prompt]:
    """Every row of a source. `source.column` becomes the prompt's text and "negative_prompt" its
    negative; all other columns go along to the rewards."""
    if source.path.startswith(HUB):
        name = source.path.removeprefix(HUB)
        rows = _table_rows(_hub_table(name, source), name)
    else:
        place, name = _locate(source.path)
        if place.suffix == ".txt":
            rows = _text_rows(place, source)
        elif place.suffix == ".jsonl":
            rows = _json_rows(place, name, source)
        else:
            table = _parquet_table if place.suffix == ".parquet" else _saved_table
            rows = _table_rows(table(place, source), name)
    prompts = [_prompt(row, f"{name}:{i}", source.column) for i, row in rows]
    if not prompts:
        raise UserError(f"prompt file {source.path} is empty; it needs a row for each prompt")
    return prompts


def weight_of(prompt: Prompt) -> float:
    """How often the row is drawn, relative to the others of its source: its column "weight"."""
    weight = prompt.columns.get("weight")
    return 1.0 if weight is None else float(weight)


def _prompt(row: Row, where: str, column: str) -> Prompt:
    if column not in row:
        raise UserError(
            f'{where}: expected a text "{column}", found only {", ".join(row) or "nothing"}; '
            'name the column of the prompts with column = "…" in [[data.train]] or [[data.eval]]'
        )
    columns = dict(row)
    text, negative = columns.pop(column), columns.pop("negative_prompt", None) or ""
    for key, value in ((column, text), ("negative_prompt", negative)):
        if not isinstance(value, str):
            raise UserError(f'{where}: expected text as "{key}", got {_short(value)}')
    weight = columns.get("weight")
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if weight is not None and not (number and 0 < weight < math.inf):
        raise UserError(
            f'{where}: expected a positive number as "weight", got {_short(weight)}; '
            "it says how often the row is drawn relative to the others"
        )
    return Prompt(text, negative, columns, where)


def _locate(path: str) -> tuple[Path, str]:
    """The file or saved dataset behind `path` or `folder@split`, and its name in messages."""
    place, split = resolve_path(path), ""
    if not place.exists() and "@" in path:  # a path that has an @ of its own is taken as it is
        folder, _, split = path.rpartition("@")
        place = resolve_path(folder)
    if not place.exists():
        raise UserError(f"prompt file {path}: no such file")
    if place.is_file() and split:
        raise UserError(f"prompt file {path}: {place.name} has no splits; leave out @{split}")
    if _is_saved(place) and not split:
        return place, place.name
    name = place.name
    if place.is_dir():
        place = _pick(place, split, path)
        name = f"{name}/{place.name}"
    if place.is_file() and place.suffix not in FILES:
        raise UserError(
            f"prompt file {path}: expected .txt, .jsonl or .parquet, "
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


def _lines(file: Path, path: str) -> list[tuple[int, str]]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"prompt file {path} is not UTF-8 text: {error}") from error
    return [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]


def _text_rows(file: Path, source: Source) -> Rows:
    if source.column != "prompt" or source.drop:
        raise UserError(f"prompt file {source.path} has no columns; leave out `column` and `drop`")
    return [(i, {"prompt": line.strip()}) for i, line in _lines(file, source.path)]


def _json_rows(file: Path, name: str, source: Source) -> Rows:
    rows = []
    for i, line in _lines(file, source.path):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{name}:{i}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{name}:{i}: expected an object as {{…}}, got {line[:60]}")
        rows.append((i, row))
    _droppable(source, {key for _, row in rows for key in row})
    return [(i, {k: v for k, v in row.items() if k not in source.drop}) for i, row in rows]


def _droppable(source: Source, known: Collection[str]) -> None:
    for name in source.drop:
        if name not in known:
            raise UserError(
                f'{source.path} has no column "{name}" to drop; it has {", ".join(sorted(known))}'
            )


def _extra(module: str, path: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(f'{path} needs {package}: pip install "gesso[data]"') from error


def _parquet_table(file: Path, source: Source) -> Any:
    """A pyarrow Table without the dropped columns, which are never read."""
    parquet = _extra("pyarrow.parquet", source.path)
    try:
        known = parquet.read_schema(file).names
        _droppable(source, known)
        return parquet.ParquetFile(file).read([n for n in known if n not in source.drop])
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"prompt file {source.path} cannot be read: {_first(error)}") from error


def _saved_table(folder: Path, source: Source) -> Any:
    datasets = _extra("datasets", source.path)
    try:
        found = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise UserError(f"dataset {source.path} cannot be read: {_first(error)}") from error
    return _arrow(found, source)


def _hub_table(name: str, source: Source) -> Any:
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
            f"{source.path} cannot be loaded: {_first(error)}; check name, split and network"
        ) from error
    return _arrow(found, source)


def _arrow(dataset: Any, source: Source) -> Any:
    """As a pyarrow Table: nothing is decoded into tensors or pictures on the way."""
    _droppable(source, dataset.column_names)
    return dataset.remove_columns(source.drop).with_format("arrow")[:]


def _table_rows(table: Any, name: str) -> Rows:
    for i, row in enumerate(table.to_pylist(), 1):
        yield i, {key: _plain(value, key, f"{name}:{i}") for key, value in row.items()}


def _plain(value: Any, column: str, where: str) -> Any:
    """What JSON can say: rewards run in other processes, and no pickle goes there."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(part, column, where) for part in value]
    if isinstance(value, dict):
        return {str(key): _plain(part, column, where) for key, part in value.items()}
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return float(value)
    raise UserError(
        f'{where}: column "{column}" holds {type(value).__name__}, which cannot be handed to '
        f'rewards; leave it out with drop = ["{column}"]'
    )


def _short(value: Any) -> str:
    return repr(value)[:60]


def _first(error: Exception) -> str:
    """The first line of an error's text: one sentence, not a page."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")

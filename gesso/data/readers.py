"""Reads prompt files and datasets into Prompt records.

prompts.txt              one prompt per line
prompts.jsonl            one object per line; GenEval's metadata file works unchanged
prompts.json             a list of objects, or {"data": a list}
prompts.parquet          extra `data`
file@train               the file itself: `datasets` names its only split "train"
folder@split             `split.txt`, `split_metadata.jsonl`, shards named as on the hub, or a
                         dataset saved to disk by `datasets` (extra `data`); see splits.py
folder                   for SFT: images or clips, each with its prompt in a text file of the same
                         name, or listed in metadata.jsonl (`file_name`, `text`)
hub:owner/name@split     a dataset on the Hugging Face hub; `hub:owner/name/subset@split` is one of
                         its subsets (extra `data`)
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gesso.config import DataSource, resolve_path
from gesso.data.chat import PLAIN, ChatFormat
from gesso.data.given import GivenColumns
from gesso.data.images import InvalidRow, check_images, first_line, short
from gesso.data.rows import Row, prompt_of
from gesso.data.splits import FILES, IMAGES, captioned, is_saved, pick
from gesso.types import Prompt, UserError
from gesso.video_files import VIDEO_SUFFIXES

HUB = "hub:"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?")  # owner/name@split
CAPTIONED = {"image": IMAGES, "video": VIDEO_SUFFIXES}  # kind of given samples → files
BATCH = 256  # rows read at a time

Rows = Iterable[tuple[int, Row]]  # numbered from 1, as in editors


@dataclass(frozen=True)
class Reading:
    prompts: list[Prompt]
    left_out: list[str]  # "geo3k.parquet:17: why", one for each row that cannot be used
    unseen: str | None = None  # a note, if not every image was decoded


def read(
    source: DataSource, chat_format: ChatFormat = PLAIN, given: GivenColumns | None = None
) -> Reading:
    """Reads every row of a source and checks its images. `source.column` becomes the prompt's
    text and "negative_prompt" its negative prompt; `given` are columns of samples; rewards receive
    all other columns."""
    try:
        results = _prompts(source, chat_format, given)
    except OSError as error:  # no permission, an unmounted disk
        raise UserError(f"prompt file {source.path} cannot be read: {error}") from error
    if not results:
        raise UserError(f"prompt file {source.path} is empty; expected one row per prompt")
    prompts = [prompt for prompt in results if isinstance(prompt, Prompt)]
    check = check_images(prompts)
    broken = {p.where: why for p, why in zip(prompts, check.faults, strict=True) if why}
    left_out = [
        row if isinstance(row, str) else f"{row.where}: {broken[row.where]}"
        for row in results
        if isinstance(row, str) or row.where in broken
    ]
    unseen = None
    if check.decoded < check.images:
        unseen = (
            f"{check.images:,} images of {source.path}: the headers of all and the pixels of "
            f"{check.decoded:,} were checked; a damaged one among the others stops the run"
        )
    return Reading([prompt for prompt in prompts if prompt.where not in broken], left_out, unseen)


def why_not_local(path: str) -> str | None:
    """Why the prompts of a source cannot be read without the network, or None."""
    if path.startswith(HUB):
        return f"{path} is not read"
    try:
        places = [resolve_path(path), resolve_path(path.rpartition("@")[0] or path)]
        return None if any(place.exists() for place in places) else f"{path} does not exist"
    except OSError:  # `read` says why
        return None


def _prompts(
    source: DataSource, chat_format: ChatFormat, given: GivenColumns | None
) -> list[Prompt | str]:
    """The prompt of each row, or why there is none."""
    results: list[Prompt | str] = []
    for table in _tables(source, given):
        for i, row in table.rows:
            where = f"{table.name}:{i}"
            try:
                results.append(prompt_of(row, where, source, table.folder, chat_format, given))
            except InvalidRow as error:
                results.append(f"{where}: {error}")
    return results


@dataclass(frozen=True)
class Table:
    """One file, or a whole dataset."""

    rows: Rows
    name: str  # in error messages
    folder: Path | None  # relative image paths start here


def _tables(source: DataSource, given: GivenColumns | None) -> Iterator[Table]:
    """The tables of a source: one, or a split's shards in order. With `given` a folder may contain
    images or clips, each with its prompt in a text file."""
    if source.path.startswith(HUB):
        name = source.path.removeprefix(HUB)
        yield Table(_hub_rows(name, source), name, None)
        return
    suffixes = CAPTIONED.get(given.kind, ()) if given else ()
    if given and (files := captioned(resolve_path(source.path), suffixes)):
        folder = files[0].parent
        yield Table(list(_caption_rows(files, given.kind)), folder.name, folder)
        return
    paths, prefix = _locate(source.path)
    names = [f"{prefix}{path.name}" for path in paths]
    kind = paths[0].suffix if paths[0].is_file() else ""
    if kind in JSON:
        yield from _json_tables(paths, names, source)
        return
    readers = {"": _saved_rows, ".txt": _text_rows, ".parquet": _parquet_rows}
    if kind == ".parquet":
        _check_same_columns(paths, names, source)
    for path, name in zip(paths, names, strict=True):
        folder = path.parent if kind else path
        yield Table(readers[kind](path, source), name, folder)


def _locate(path: str) -> tuple[Sequence[Path], str]:
    """Returns (files or saved dataset of `path` or `folder@split`, prefix of their names in error
    messages)."""
    location, split = resolve_path(path), ""
    if not location.exists() and "@" in path:  # an existing path may contain an @
        folder, _, split = path.rpartition("@")
        location = resolve_path(folder)
    if not location.exists():
        hint = f'; for a hub dataset use "{HUB}{path}"' if HUB_NAME.fullmatch(path) else ""
        raise UserError(f"prompt file {path}: no such file{hint}")
    if not location.is_file() and not location.is_dir():
        raise UserError(f"prompt file {path} is neither a file nor a folder")
    if location.is_file() and split not in ("", "train"):
        raise UserError(
            f"prompt file {path}: {location.name} is a single file, which has only the split "
            f"@train; remove @{split}"
        )
    if location.is_dir() and not (is_saved(location) and not split):
        return pick(location, split, path).paths, f"{location.name}/"
    if location.is_file() and location.suffix not in FILES:
        raise UserError(
            f"prompt file {path}: expected .txt, .jsonl, .json or .parquet, "
            f"got {location.suffix or 'no suffix'}"
        )
    return [location], ""


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"prompt file {file} is not UTF-8 text: {error}") from error


def _lines(file: Path) -> list[tuple[int, str]]:
    lines = _text(file).split("\n")
    return [(i, line) for i, line in enumerate(lines, 1) if line.strip()]


def _text_rows(file: Path, source: DataSource) -> Rows:
    if source.column not in (None, "prompt") or source.images or source.drop:
        raise UserError(
            f"prompt file {source.path} is a text file without columns; remove `column`, `images` "
            "and `drop`"
        )
    return [(i, {"prompt": line.strip()}) for i, line in _lines(file)]


def _caption_rows(files: Sequence[Path], column: str) -> Rows:
    for i, file in enumerate(files, 1):
        caption = file.with_suffix(".txt")
        if not caption.is_file():
            raise UserError(
                f"{file} has no prompt: expected it in {caption.name}; add the file, or remove "
                f"the {column}"
            )
        yield i, {"prompt": _text(caption).strip(), column: file.name}


def _json_tables(files: Sequence[Path], names: Sequence[str], source: DataSource) -> list[Table]:
    """JSON rows may lack columns, so the source's columns are checked against all rows together."""
    tables = [
        Table(JSON[file.suffix](file, name), name, file.parent)
        for file, name in zip(files, names, strict=True)
    ]
    rows = [row for table in tables for row in table.rows]
    if rows:
        _check_columns(source, {key for _, row in rows for key in row})
    for _, row in rows:
        for name in source.drop:
            row.pop(name, None)
    return tables


def _line_rows(file: Path, name: str) -> Rows:
    rows = []
    for i, line in _lines(file):
        try:
            rows.append((i, json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name}:{i}: not JSON: {error}") from error
    return _objects(rows, name)


def _json_rows(file: Path, name: str) -> Rows:
    """A list, {"data": a list} or, as `datasets` writes it, one object per line."""
    try:
        content = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            return _line_rows(file, name)
        raise UserError(f"prompt file {file} is not JSON: {error}") from error
    if isinstance(content, dict) and "data" in content:
        content = content["data"]
    if not isinstance(content, list):
        raise UserError(
            f'prompt file {file}: expected a list [{{…}}, …] or {{"data": [{{…}}, …]}}, '
            f"got {short(content)}"
        )
    return _objects(list(enumerate(content, 1)), name)


JSON = {".jsonl": _line_rows, ".json": _json_rows}


def _objects(rows: Rows, name: str) -> Rows:
    for i, row in rows:
        if not isinstance(row, dict):
            raise UserError(f"{name}:{i}: expected an object {{…}}, got {json.dumps(row)[:60]}")
    return rows


def _check_columns(source: DataSource, known: Collection[str]) -> None:
    """Raises if a column that the recipe names does not exist."""
    required = [(name, "drop") for name in source.drop]
    required += [(source.images, "images")] if source.images else []
    for name, key in required:
        if name not in known:
            raise UserError(
                f'{source.path} has no column "{name}", which `{key}` names; its columns are '
                f"{', '.join(sorted(known))}"
            )


def _extra(module: str, path: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(f'{path} requires {package}: pip install "gesso[data]"') from error


def _check_same_columns(files: Sequence[Path], names: Sequence[str], source: DataSource) -> None:
    """Raises unless all shards of a table have the same columns, ignoring dropped ones."""
    columns = [_columns(file, source) for file in files]
    _check_columns(source, set().union(*columns))
    first = columns[0] - set(source.drop)
    for name, shard_columns in zip(names, columns, strict=True):
        odd = (shard_columns - set(source.drop)) ^ first
        if odd:
            has, lacks = (name, names[0]) if odd & shard_columns else (names[0], name)
            raise UserError(
                f'{has} has the column "{min(odd)}" but {lacks} does not; all shards of a split '
                "must have the same columns: fix the files, or skip the column with drop"
            )


def _columns(file: Path, source: DataSource) -> set[str]:
    with _parquet_file(file, source) as opened:
        return set(opened.schema_arrow.names)


def _parquet_rows(file: Path, source: DataSource) -> Rows:
    """Batch by batch, so that images are not in memory twice; dropped columns are never read."""
    with _parquet_file(file, source) as opened:
        kept = [name for name in opened.schema_arrow.names if name not in source.drop]
        yield from _numbered(opened.iter_batches(BATCH, columns=kept))


@contextmanager
def _parquet_file(file: Path, source: DataSource) -> Iterator[Any]:
    parquet = _extra("pyarrow.parquet", source.path)
    try:
        with parquet.ParquetFile(file) as opened:
            yield opened
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"prompt file {file} cannot be read: {first_line(error)}") from error


def _saved_rows(folder: Path, source: DataSource) -> Rows:
    datasets = _extra("datasets", source.path)
    try:
        dataset = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise UserError(f"dataset {source.path} cannot be read: {first_line(error)}") from error
    return _dataset_rows(dataset, source)


def _hub_rows(name: str, source: DataSource) -> Rows:
    repository, _, split = name.partition("@")
    owner, *rest = repository.split("/")
    if not split or not owner or not all(rest) or len(rest) > 2:
        raise UserError(f"{source.path}: expected hub:owner/name@split, e.g. hub:me/signs@train")
    subset = rest[1] if len(rest) == 2 else None
    datasets = _extra("datasets", source.path)
    try:
        with _quiet_hub():
            dataset = datasets.load_dataset("/".join([owner, *rest[:1]]), subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{source.path} cannot be loaded: {first_line(error)}; check name, split and network"
        ) from error
    return _dataset_rows(dataset, source)


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Silences the hub client's warning about each retry; the final error is enough."""
    from huggingface_hub.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _dataset_rows(dataset: Any, source: DataSource) -> Rows:
    """Reads through pyarrow, so that nothing is decoded into tensors or images."""
    _check_columns(source, dataset.column_names)
    tables = dataset.remove_columns(source.drop).with_format("arrow")
    yield from _numbered(tables.iter(BATCH))


def _numbered(batches: Iterable[Any]) -> Rows:
    return enumerate(itertools.chain.from_iterable(batch.to_pylist() for batch in batches), 1)

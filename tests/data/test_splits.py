"""Folders of shards, laid out as hub datasets on disk."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from gesso.config import DataSource
from gesso.data import readers
from gesso.data.prompts import Stream, WeightedPrompts
from gesso.types import Prompt, UserError

Write = Callable[[Path, list[dict[str, Any]]], None]


def as_parquet(file: Path, rows: list[dict[str, Any]]) -> None:
    parquet.write_table(pa.Table.from_pylist(rows), file)


def as_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_list(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text(json.dumps(rows))


WRITERS: dict[str, Write] = {"parquet": as_parquet, "jsonl": as_lines, "json": as_list}


def read(path: Path | str, **options: Any) -> list[Prompt]:
    reading = readers.read(DataSource(path=str(path), **options))
    assert reading.left_out == []
    return reading.prompts


def rows(first: int, count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{i}", "answer": i} for i in range(first, first + count)]


def shards(
    folder: Path, split: str = "train", sizes: tuple[int, ...] = (3, 1, 2), kind: str = "parquet"
) -> Path:
    """Writes shards with consecutive rows; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for i, size in enumerate(sizes):
        file = folder / f"{split}-{i:05d}-of-{len(sizes):05d}.{kind}"
        WRITERS[kind](file, rows(first, size))
        first += size
    return folder


def rejected(path: Path | str, sentence: str, **options: Any) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        read(path, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", WRITERS)
def test_shards_are_read_in_order_and_named_by_file_and_row(tmp_path: Path, kind: str) -> None:
    folder = shards(tmp_path / "signs", kind=kind)
    prompts = read(folder)
    assert [(p.text, p.columns) for p in prompts] == [(f"p{i}", {"answer": i}) for i in range(6)]
    names = [f"signs/train-{n:05d}-of-00003.{kind}" for n in range(3)]
    lines = [(names[0], 1), (names[0], 2), (names[0], 3), (names[1], 1), (names[2], 1)]
    assert [p.where for p in prompts[:5]] == [f"{name}:{line}" for name, line in lines]
    assert prompts == read(f"{folder}@train")


def test_many_shards_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for i in range(12):  # names alone would put 10 before 2
        as_lines(tmp_path / f"train-{i}-of-12.jsonl", rows(i, 1))
    assert [p.text for p in read(tmp_path)] == [f"p{i}" for i in range(12)]


def test_a_split_is_also_searched_in_data(tmp_path: Path) -> None:
    for folder in (tmp_path / "flat", tmp_path / "hub" / "data"):
        shards(folder)
        shards(folder, "test", (2,))
    (tmp_path / "hub" / "README.md").write_text("about it")
    (tmp_path / "hub" / "dataset_infos.json").write_text("{}")
    (tmp_path / "hub" / "data" / "._test-00000-of-00001.parquet").write_bytes(b"of a Mac")
    for name in ("flat", "hub"):
        folder = tmp_path / name
        assert len(read(f"{folder}@train")) == 6
        assert [p.where for p in read(f"{folder}@test")] == [
            f"{name}/test-00000-of-00001.parquet:{i}" for i in (1, 2)
        ]
        known = re.escape(f"{folder}@test, {folder}@train")
        rejected(folder, f"no split given; choose one of {known}$")
        rejected(f"{folder}@dev", f'no split "dev"; choose one of {known}$')


def test_a_hash_may_follow_the_number(tmp_path: Path) -> None:
    as_parquet(tmp_path / "train-00000-of-00002-a1b2c3.parquet", rows(0, 1))
    as_parquet(tmp_path / "train-00001-of-00002-d4e5f6.parquet", rows(1, 1))
    assert [p.text for p in read(f"{tmp_path}@train")] == ["p0", "p1"]


def test_the_only_split_of_a_folder_need_not_be_named(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a\nb\n")
    assert [p.where for p in read(tmp_path)] == [f"{tmp_path.name}/train.txt:{i}" for i in (1, 2)]


def test_a_run_gets_the_same_batches_from_shards_as_from_one_file(tmp_path: Path) -> None:
    """Batch i depends only on the seed and i, so a resumed run continues where it stopped."""
    as_parquet(tmp_path / "whole.parquet", rows(0, 11))
    shards(tmp_path / "parts", sizes=(4, 1, 6))
    batches = []
    for path in (tmp_path / "whole.parquet", tmp_path / "parts"):
        stream = Stream([WeightedPrompts(read(path))], seed=7)
        batches.append([[p.text for p in stream.batch(i, 3)] for i in (5, 0, 9)])
    assert batches[0] == batches[1]


def test_image_paths_are_relative_to_the_shards(tmp_path: Path) -> None:
    from PIL import Image

    folder = shards(tmp_path / "set" / "data", sizes=(0, 0), kind="jsonl")
    Image.new("RGB", (4, 4)).save(folder / "a.png")
    as_lines(folder / "train-00001-of-00002.jsonl", [{"problem": "<image>?", "images": ["a.png"]}])
    (prompt,) = read(tmp_path / "set")
    assert prompt.images[0].path == str(folder / "a.png")


def test_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about it")
    expected = "expected files such as train.txt, .*train-00000-of-00003.parquet, or a dataset"
    rejected(tmp_path, f"contains no prompts; {expected}")
    shards(tmp_path / "main")
    shards(tmp_path / "socratic" / "data")
    hint = f"its subfolders do: main, socratic; give one of them, e.g. {tmp_path}/main$"
    rejected(f"{tmp_path}@train", f"contains no prompts; {hint}")


def test_shards_of_different_columns(tmp_path: Path) -> None:
    folder = shards(tmp_path / "s", sizes=(1, 1, 1))
    odd = folder / "train-00001-of-00003.parquet"
    names = [f"s/train-{i:05d}-of-00003.parquet" for i in range(2)]
    hint = "all shards of a split must have the same columns: fix the files, or skip the column"
    as_parquet(odd, [{"prompt": "x", "answer": 1, "tag": "t"}])
    rejected(folder, f'^{names[1]} has the column "tag" but {names[0]} does not; {hint} with drop$')
    assert [p.text for p in read(folder, drop=["tag"])] == ["p0", "x", "p2"]
    as_parquet(odd, [{"prompt": "x"}])
    rejected(folder, f'^{names[0]} has the column "answer" but {names[1]} does not; {hint}')
    rejected(folder, 'no column "tga", which `drop` names; .* answer, prompt$', drop=["tga"])


def test_rows_of_json_need_not_have_every_column(tmp_path: Path) -> None:
    as_lines(tmp_path / "train-00000-of-00002.jsonl", [{"prompt": "a", "tag": 1}])
    as_lines(tmp_path / "train-00001-of-00002.jsonl", [{"prompt": "b"}])
    assert [p.columns for p in read(tmp_path)] == [{"tag": 1}, {}]
    assert [p.columns for p in read(tmp_path, drop=["tag"])] == [{}, {}]
    rejected(tmp_path, 'no column "tga", which `drop` names; .* prompt, tag$', drop=["tga"])


def test_errors_name_the_shard(tmp_path: Path) -> None:
    folder = shards(tmp_path / "s", sizes=(1, 1), kind="jsonl")
    second = folder / "train-00001-of-00002.jsonl"
    second.write_text('{"prompt": "x"}\n{oops\n')
    rejected(folder, "^s/train-00001-of-00002.jsonl:2: not JSON")
    second.write_text('{"caption": "x"}\n')
    rejected(folder, '^s/train-00001-of-00002.jsonl:1: expected a text column "prompt", ')
    second.write_bytes(b"\xff\xfe")
    rejected(folder, "train-00001-of-00002.jsonl is not UTF-8")
    second.write_text('{"prompt": 5}\n')
    reason = 's/train-00001-of-00002.jsonl:1: expected text as "prompt", got 5'
    assert readers.read(DataSource(path=str(folder))).left_out == [reason]
    tables = shards(tmp_path / "t", sizes=(1, 1))
    (tables / "train-00001-of-00002.parquet").write_bytes(b"no table")
    rejected(tables, "train-00001-of-00002.parquet cannot be read: ")


def test_an_incomplete_download(tmp_path: Path) -> None:
    folder = shards(tmp_path / "s")
    (folder / "train-00001-of-00003.parquet").unlink()
    rejected(folder, '"train" has 2 of 3 shards; the first missing shard is number 00001; downl')


def test_shards_that_do_not_belong_together(tmp_path: Path) -> None:
    folder = shards(tmp_path / "s", sizes=(1, 1))
    beyond = folder / "train-00002-of-00002.parquet"
    as_parquet(beyond, rows(0, 1))
    rejected(folder, f'"train" has 2 shards, but the number of {beyond.name} is out of range; rem')
    beyond.rename(folder / "train-00001-of-00002-ff.parquet")
    rejected(folder, r"one shard twice, train-00001-of-00002-ff.* and train-00001-of-00002.parquet")
    shards(tmp_path / "t", sizes=(1, 1))
    shards(tmp_path / "t" / "data", sizes=(1,))
    first, second = "train-00000-of-00002.parquet with 1 more", "data/train-00000-of-00001.parquet"
    rejected(tmp_path / "t", f'"train" is ambiguous: {first} and {second}; give the path of t')

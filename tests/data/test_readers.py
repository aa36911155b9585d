"""Real files of every format, and the error for each that cannot be read."""

from __future__ import annotations

import datetime
import decimal
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from gesso.config import DataSource
from gesso.data import readers
from gesso.data.rows import weight_of
from gesso.types import Prompt, UserError

GENEVAL = {
    "tag": "position",
    "include": [
        {"class": "bench", "count": 1},
        {"class": "dog", "count": 1, "position": ["right of", 0]},
    ],
    "exclude": [{"class": "dog", "count": 2}],
    "prompt": "a photo of a dog right of a bench",
}
ROWS: list[dict] = [
    {"prompt": "a", "negative_prompt": "blurry", "weight": 2.0, "target": "KITE", "box": [1, 2]},
    {"prompt": "b", "negative_prompt": None, "weight": None, "target": None, "box": []},
]


@pytest.fixture(autouse=True)
def cache_apart(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))


def source(path: Path | str, **options: Any) -> DataSource:
    return DataSource(path=str(path), **options)


def read(source: DataSource) -> list[Prompt]:
    reading = readers.read(source)
    assert reading.left_out == []
    return reading.prompts


def write_parquet(file: Path, rows: list[dict]) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows), file)
    return file


def save(folder: Path, rows: list[dict]) -> Path:
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(folder)
    return folder


def rows_of(prompts: list[Prompt]) -> list[tuple]:
    assert not any(p.images or p.messages for p in prompts)  # prompts of image models
    return [(p.text, p.negative, p.columns, p.where) for p in prompts]


def expected(name: str) -> list[tuple]:
    """ROWS, the same for every format."""
    return [
        ("a", "blurry", {"weight": 2.0, "target": "KITE", "box": [1, 2]}, f"{name}:1"),
        ("b", "", {"weight": None, "target": None, "box": []}, f"{name}:2"),
    ]


def test_text(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes('\ufeffa "B"\r\n\n  two\u2028lines \n'.encode())
    assert [(p.text, p.where) for p in read(source(file))] == [
        ('a "B"', "a.txt:1"),
        ("two\u2028lines", "a.txt:3"),
    ]


def test_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "b.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in [*ROWS, {"prompt": "c\u2028d"}]]
    file.write_text("\n".join(lines), encoding="utf-8")
    *first, last = read(source(file))
    assert rows_of(first) == expected("b.jsonl")
    assert (last.text, last.columns, weight_of(last)) == ("c\u2028d", {}, 1.0)
    assert [weight_of(p) for p in first] == [2.0, 1.0]


def test_parquet(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "c.parquet", ROWS)
    assert rows_of(read(source(file))) == expected("c.parquet")


@pytest.mark.parametrize("wrap", ["[%s]", '{"data": [%s], "version": 2}', "lines"])
def test_json(tmp_path: Path, wrap: str) -> None:
    rows = [json.dumps(row) for row in ROWS]
    text = "\n".join(rows) if wrap == "lines" else wrap % ",\n".join(rows)
    (tmp_path / "d.json").write_text(text)
    assert rows_of(read(source(tmp_path / "d.json"))) == expected("d.json")


def test_one_file_is_the_split_train(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in ROWS]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    (tmp_path / "d.json").write_text(f"[{','.join(lines)}]")
    write_parquet(tmp_path / "c.parquet", ROWS)
    for name in ("b.jsonl", "d.json", "c.parquet"):
        assert rows_of(read(source(f"{tmp_path / name}@train"))) == expected(name)
        with pytest.raises(UserError, match=rf"{name} is a single file, which has only the split"):
            read(source(f"{tmp_path / name}@validation"))


def test_a_dataset_on_disk(tmp_path: Path) -> None:
    assert rows_of(read(source(save(tmp_path / "saved", ROWS)))) == expected("saved")


def test_splits_of_a_dataset_on_disk(tmp_path: Path) -> None:
    import datasets

    full = datasets.Dataset.from_list(ROWS)
    folder = tmp_path / "both"
    datasets.DatasetDict({"train": full, "test": full.select([1])}).save_to_disk(folder)
    assert rows_of(read(source(f"{folder}@train"))) == expected("both/train")
    assert [p.where for p in read(source(f"{folder}@test"))] == ["both/test:1"]
    with pytest.raises(UserError, match=r"no split given; choose one of .*@train, .*both@test"):
        read(source(folder))


def test_geneval_metadata_reaches_the_rewards_unchanged(tmp_path: Path) -> None:
    (tmp_path / "train_metadata.jsonl").write_text(json.dumps(GENEVAL) + "\n")
    (tmp_path / "test_metadata.jsonl").write_text(json.dumps(GENEVAL | {"prompt": "x"}) + "\n")
    (prompt,) = read(source(f"{tmp_path}@train"))
    assert {"prompt": prompt.text, **prompt.columns} == GENEVAL
    assert prompt.where == f"{tmp_path.name}/train_metadata.jsonl:1"
    assert [p.text for p in read(source(f"{tmp_path}@test"))] == ["x"]
    (direct,) = read(source(tmp_path / "train_metadata.jsonl"))
    assert (direct.text, direct.columns) == (prompt.text, prompt.columns)


def test_flow_grpo_folder(tmp_path: Path) -> None:
    folder = tmp_path / "me@work" / "ocr"  # an @ in the path itself
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.txt").write_text(f"{split} one\n{split} two\n")
    assert [p.text for p in read(source(f"{folder}@test"))] == ["test one", "test two"]
    assert [p.where for p in read(source(folder / "test.txt"))] == ["test.txt:1", "test.txt:2"]
    assert len(read(source("zoo:prompts@eval"))) == len(read(source("zoo:prompts/eval.txt")))


def test_another_column_is_the_prompt(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "c.parquet", [{"caption": "a", "prompt": "b"}])
    (prompt,) = read(source(file, column="caption"))
    assert (prompt.text, prompt.columns) == ("a", {"prompt": "b"})


def test_tables_become_plain_python(tmp_path: Path) -> None:
    row = {
        "prompt": "a",
        "day": datetime.date(2024, 5, 1),
        "at": datetime.datetime(2024, 5, 1, 12, 30),
        "price": decimal.Decimal("4.99"),
        "nested": {"boxes": [{"xy": [1, 2], "score": 0.5}]},
        "flag": True,
        "small": 3,
    }
    table = pa.Table.from_pylist([row])
    table = table.set_column(6, "small", pa.array([3], pa.int8())).append_column(
        "word", pa.array(["x"]).dictionary_encode()
    )
    parquet.write_table(table, tmp_path / "c.parquet")
    (prompt,) = read(source(tmp_path / "c.parquet"))
    assert json.loads(json.dumps(prompt.columns)) == prompt.columns  # as it is sent to rewards
    assert prompt.columns == {
        "day": "2024-05-01",
        "at": "2024-05-01T12:30:00",
        "price": 4.99,
        "nested": {"boxes": [{"xy": [1, 2], "score": 0.5}]},
        "flag": True,
        "small": 3,
        "word": "x",
    }


def test_columns_reach_a_reward_in_its_process(tmp_path: Path) -> None:
    import asyncio

    import numpy as np

    from gesso.rewards.transport.workers import WorkerScorer
    from gesso.types import Sample

    file = write_parquet(tmp_path / "c.parquet", [{"prompt": "a", "n": {"deep": [7]}}])
    (prompt,) = read(source(file))

    async def ask() -> list:
        workers = WorkerScorer("tests.data.test_readers:deep", {}, 1)
        try:
            return await workers.score([Sample(prompt, np.zeros((1, 1, 3), np.uint8), 0)])
        finally:
            await workers.close()

    assert [s.value for s in asyncio.run(ask())] == [7.0]


def deep(samples: list) -> list[float]:
    """The reward of the test above."""
    return [float(s.prompt.columns["n"]["deep"][0]) for s in samples]


def test_bytes_other_than_prompt_images_must_be_dropped(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "mask": {"bytes": b"\x89PNG", "path": "x.png"}}]
    for path in (write_parquet(tmp_path / "c.parquet", rows), save(tmp_path / "saved", rows)):
        fault = rf'{path.name}:1: column "mask" contains bytes.*drop ='
        with pytest.raises(UserError, match=fault):
            read(source(path))
        (prompt,) = read(source(path, drop=["mask"]))
        assert prompt.columns == {}


def test_a_column_to_drop_must_exist(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "tag": 1}\n{"prompt": "y", "id": 2}\n')
    paths = [
        write_parquet(tmp_path / "a.parquet", [{"prompt": "x", "tag": 1, "id": 2}]),
        save(tmp_path / "saved", [{"prompt": "x", "tag": 1, "id": 2}]),
        tmp_path / "a.jsonl",
    ]
    fault = 'no column "tga", which `drop` names; its columns are id, prompt, tag'
    for path in paths:
        assert "tag" not in read(source(path, drop=["tag"]))[0].columns
        with pytest.raises(UserError, match=fault):
            read(source(path, drop=["tga"]))


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("missing.txt", None, r"missing.txt: no such file"),
        ("empty.txt", "\n \n", "is empty; expected one row per prompt"),
        ("table.csv", "x", r"expected .txt, .jsonl, .json or .parquet, got .csv"),
        ("bad.jsonl", '{"prompt": "x"}\n{oops\n', "bad.jsonl:2: not JSON"),
        ("bad.jsonl", "[1]\n", r"bad.jsonl:1: expected an object \{…\}, got \[1\]"),
        ("bad.jsonl", '{"text": "x", "b": 1}', 'bad.jsonl:1: expected a text column "prompt", '
         '"problem", "message", "messages" or "question", got text, b; set the prompt column '
         'with column = "…"'),
        ("bad.jsonl", '{"prompt": "x", "negative_prompt": ["a"]}',
         r"""expected text as "negative_prompt", got \['a'\]"""),
        ("bad.parquet", "not parquet", "bad.parquet cannot be read: "),
        ("bad.json", "{oops", "bad.json is not JSON: "),
        ("deep.jsonl", f'{{"prompt": {"[" * 9999}', r"deep.jsonl:1: not JSON: maximum recursion"),
        ("deep.json", "[" * 9999, r"deep.json is not JSON: maximum recursion"),
        ("long.jsonl", f'{{"n": {"9" * 9999}}}', r"long.jsonl:1: not JSON: Exceeds the limit"),
        ("bad.json", '{"prompt": "x"}', r"bad.json: expected a list \[\{…\}, …\] or \{"),
        ("bad.json", '[{"prompt": "x"}, 5]', r"bad.json:2: expected an object \{…\}, got 5"),
        ("bad.json", '{"prompt": "x"}\n\n{"x": 1}', r"bad.json:3: expected a text"),
        ("bad.json", "[]", "is empty; expected one row per prompt"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path: Path, name: str, content: str | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=sentence) as caught:
        read(source(tmp_path / name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "got"), [('["x"]', "['x']"), ("[]", "[]"), ("5", "5"), ("null", "None")]
)
def test_a_row_without_a_prompt_is_skipped(tmp_path: Path, value: str, got: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(f'{{"prompt": "x"}}\n{{"prompt": {value}}}\n')
    reading = readers.read(source(file))
    assert [prompt.text for prompt in reading.prompts] == ["x"]
    assert reading.left_out == [f'bad.jsonl:2: expected text as "prompt", got {got}']


@pytest.mark.parametrize("weight", ["0", "-1", "true", '"2"', "NaN", "Infinity", "[1]"])
def test_bad_weights(tmp_path: Path, weight: str) -> None:
    text = f'{{"prompt": "x", "weight": 1}}\n{{"prompt": "y", "weight": {weight}}}\n'
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(UserError, match=r'^a.jsonl:2: expected a positive number as "weight"'):
        read(source(tmp_path / "a.jsonl"))


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        read(source(tmp_path / "a.txt"))


def test_a_file_without_read_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x\n")

    def forbidden(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", forbidden)
    with pytest.raises(UserError, match=r"a.txt cannot be read: .*Permission denied$"):
        read(source(tmp_path / "a.txt"))


def test_bad_splits(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"contains no prompts; expected files such as train.txt"):
        read(source(f"{tmp_path}@train"))
    (tmp_path / "train.txt").write_text("x\n")
    with pytest.raises(UserError, match=r'no split "dev"; choose one of \S+@train$'):
        read(source(f"{tmp_path}@dev"))
    with pytest.raises(UserError, match=r"train.txt is a single file, .*; remove @test$"):
        read(source(f"{tmp_path / 'train.txt'}@test"))
    with pytest.raises(UserError, match="nowhere@train: no such file"):
        read(source("nowhere@train"))
    (tmp_path / "train_metadata.jsonl").write_text('{"prompt": "x"}\n')
    ambiguous = r'"train" is ambiguous: train.txt and train_metadata.jsonl; give'
    with pytest.raises(UserError, match=ambiguous):
        read(source(f"{tmp_path}@train"))


@pytest.mark.parametrize("options", [{"column": "caption"}, {"drop": ["a"]}, {"images": "a"}])
def test_plain_lines_have_no_columns(tmp_path: Path, options: dict) -> None:
    (tmp_path / "a.txt").write_text("x\n")
    with pytest.raises(UserError, match="without columns; remove `column`, `images` and `drop`"):
        read(source(tmp_path / "a.txt", **options))


def test_sources_of_older_run_folders_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x\n")
    assert rows_of(read(source(tmp_path / "a.txt", column="prompt"))) == [("x", "", {}, "a.txt:1")]


def test_a_damaged_dataset(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", ROWS)
    for file in folder.glob("*.arrow"):
        file.write_bytes(b"")
    with pytest.raises(UserError, match=r"^dataset .*saved cannot be read: "):
        read(source(folder))


@pytest.mark.parametrize("package", ["pyarrow", "datasets"])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    if package == "datasets":
        path = save(tmp_path / "saved", ROWS)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # importing it raises, as when it is absent
    with pytest.raises(UserError, match=rf'requires {package}: pip install "gesso\[data\]"$'):
        read(source(path))


def test_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real `load_dataset`; a folder with the dataset's name replaces the network."""
    folder = tmp_path / "me" / "signs"
    folder.mkdir(parents=True)
    write_parquet(folder / "train.parquet", ROWS)
    write_parquet(folder / "test.parquet", ROWS[1:])
    monkeypatch.chdir(tmp_path)
    assert rows_of(read(source("hub:me/signs@train"))) == expected("me/signs@train")
    assert [p.where for p in read(source("hub:me/signs@test"))] == ["me/signs@test:1"]
    assert [p.text for p in read(source("hub:me/signs@train[1:]"))] == ["b"]
    with pytest.raises(UserError, match=r'signs@dev cannot be loaded: Unknown split "dev"'):
        read(source("hub:me/signs@dev"))


@pytest.mark.parametrize("path", ["hub:me/signs", "hub:@train", "hub:me/@train", "hub:a/b/c/d@x"])
def test_bad_hub_names(path: str) -> None:
    with pytest.raises(UserError, match=r"expected hub:owner/name@split, e.g. hub:me/signs@train"):
        read(source(path))


def test_hub_subsets_and_an_unreachable_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from huggingface_hub.utils import logging

    requests, before = [], logging.get_verbosity()

    def unreachable(*names: str | None, split: str) -> None:
        requests.append((*names, split))
        assert logging.get_verbosity() == logging.ERROR != before  # retries are not logged
        raise ConnectionError("Couldn't reach the Hub\nby any means")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    for path in ("hub:squad@train", "hub:me/signs@train", "hub:me/signs/big@test"):
        with pytest.raises(UserError, match="cannot be loaded: Couldn't reach the Hub; check name"):
            read(source(path))
    assert requests == [
        ("squad", None, "train"),
        ("me/signs", None, "train"),
        ("me/signs", "big", "test"),
    ]
    assert logging.get_verbosity() == before

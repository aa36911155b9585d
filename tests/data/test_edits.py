"""Rows of editing data: Flow-Factory, VeRL-Omni and UniRL files, masks and target images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from gesso import build
from gesso.cluster.channel import pack_prompts, read_prompts
from gesso.config import DataSource
from gesso.data import images, prompts, readers
from gesso.data.given import GivenColumns
from gesso.types import Prompt, PromptImage, UserError
from tests.data.test_formats import BLUE, RED, jsonl, left_out, read


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "red.png").write_bytes(RED)
    (tmp_path / "blue.jpg").write_bytes(BLUE)
    return tmp_path


def shown(prompt: Prompt) -> list[bytes]:
    return [image.read() for image in prompt.images]


def test_flow_factory(folder: Path) -> None:
    """Files in `images/` beside the JSONL; one in the file's own folder comes first."""
    rows: list[dict] = [
        {"prompt": "make it blue", "image": "red.png", "requirement": "keep the word"},
        {"prompt": "join them", "images": ["red.png", "blue.jpg"], "negative_prompt": "blurry"},
    ]
    one, two = read(jsonl(folder / "train.jsonl", *rows))
    assert (one.text, shown(one)) == ("make it blue", [RED])
    assert one.columns == {"requirement": "keep the word"}
    assert (two.text, two.negative, shown(two)) == ("join them", "blurry", [RED, BLUE])
    (folder / "red.png").write_bytes(BLUE)
    assert shown(read(folder / "train.jsonl")[0]) == [BLUE]


def test_verl_omni(tmp_path: Path) -> None:
    row: dict[str, Any] = {
        "prompt": [
            {"role": "system", "content": "You edit images."},
            {"role": "user", "content": "<image>make it blue"},
        ],
        "negative_prompt": [{"role": "user", "content": " "}],
        "images": [{"bytes": RED, "path": None}],
        "data_source": "edits",
    }
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    (prompt,) = read(tmp_path / "train.parquet")
    assert (prompt.text, prompt.negative, shown(prompt)) == ("make it blue", "", [RED])
    row["negative_prompt"][0]["content"] = "<image>blurry"
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    assert read(tmp_path / "train.parquet")[0].negative == "blurry"


def test_unirl(folder: Path) -> None:
    def item(role: str, uri: str) -> dict[str, str]:
        return {"modality": "image", "role": role, "uri": uri}

    media = [item("condition", "red.png"), item("target", "blue.jpg"), item("mask", "red.png")]
    (prompt,) = read(jsonl(folder / "a.jsonl", {"prompt": "make it blue", "media": media}))
    assert shown(prompt) == [RED] and "media" not in prompt.columns
    assert prompt.image_columns["target_image"].read() == BLUE
    assert prompt.image_columns["mask"].read() == RED
    film = {"modality": "video", "role": "condition", "uri": "red.png"}
    why = left_out(jsonl(folder / "b.jsonl", {"prompt": "x", "media": [film]}))
    assert why.startswith('b.jsonl:1: media 1: expected {"modality": "image", "role", "uri"}, got')


def test_mask_and_target_image(folder: Path) -> None:
    row = {"prompt": "x", "image": "red.png", "mask": "blue.jpg", "target_image": "red.png"}
    (prompt,) = read(jsonl(folder / "a.jsonl", {**row, "target": "KITE"}))
    assert prompt.columns == {"target": "KITE"}  # the text that `ocr` expects
    assert {k: image.read() for k, image in prompt.image_columns.items()} == {
        "mask": BLUE, "target_image": RED,
    }  # fmt: skip
    assert read_prompts(pack_prompts([prompt])) == [prompt]
    other = read(jsonl(folder / "a.jsonl", {**row, "mask": "images/red.png"}))
    assert prompts.prompt_key(other[0]) != prompts.prompt_key(prompt)
    why = left_out(jsonl(folder / "b.jsonl", {**row, "mask": "gone.png"}))
    assert why.startswith("b.jsonl:1: column \"mask\": no such file 'gone.png' in ")


def test_a_mask_of_a_row_without_images_is_a_column(tmp_path: Path) -> None:
    (prompt,) = read(jsonl(tmp_path / "a.jsonl", {"prompt": "x", "mask": "of a fencer"}))
    assert prompt.columns == {"mask": "of a fencer"} and not prompt.image_columns


def test_a_damaged_mask_is_reported(folder: Path) -> None:
    (folder / "mask.png").write_bytes(RED[:40])
    why = left_out(
        jsonl(folder / "a.jsonl", {"prompt": "x", "image": "red.png", "mask": "mask.png"})
    )
    assert "image 2 of 2: " in why and "mask.png is not an image" in why


def test_sft_of_edits_trains_on_the_target_image(folder: Path) -> None:
    row = {"prompt": "make it blue", "image": "red.png", "target_image": "blue.jpg"}
    source = DataSource(path=jsonl(folder / "a.jsonl", row))
    for required in (True, False):
        given = GivenColumns(["image"], "image", required)
        (prompt,) = readers.read(source, given=given).prompts
        assert shown(prompt) == [RED] and not prompt.image_columns
        assert [each.read() for each in prompt.given if isinstance(each, PromptImage)] == (
            [BLUE] if required else []
        )


def test_sft_of_edits_without_a_target_image(folder: Path) -> None:
    """Its only image is the input, and not the sample."""
    keys = ["model.name=kontext", "model.path=zoo:edits", "data.train=a.jsonl"]
    given = build.given(build.recipe("demo-sft", keys))
    source = DataSource(path=jsonl(folder / "a.jsonl", {"prompt": "x", "image": "red.png"}))
    with pytest.raises(UserError, match=r'a.jsonl:1: expected a column "target_image", which the'):
        readers.read(source, given=given)


def test_of_many_images_only_some_are_decoded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged header is found in every row, damaged pixels only in rows that are decoded."""
    monkeypatch.setattr(images, "MAX_DECODED", 2)
    files = [RED, RED[:20], RED[:-30], RED]
    for i, data in enumerate(files):
        (folder / "images" / f"{i}.png").write_bytes(data)
    rows = [{"prompt": str(i), "image": f"{i}.png"} for i in range(4)]
    source = DataSource(path=jsonl(folder / "a.jsonl", *rows))
    reading = readers.read(source)
    assert [p.text for p in reading.prompts] == ["0", "3"] and len(reading.left_out) == 2
    assert reading.unseen is not None
    assert "4 images of" in reading.unseen and "the pixels of 2 were checked" in reading.unseen
    monkeypatch.setattr(images, "MAX_DECODED", 4)
    assert readers.read(source).unseen is None

"""Rows of EasyR1, LMM-R1 and TRL in real files, and the reason for each row that is skipped."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from gesso.config import Data, DataSource
from gesso.config.parsing import parse
from gesso.data import prompts, readers
from gesso.data.chat import ChatFormat
from gesso.data.prompts import Stream
from gesso.types import Prompt, PromptImage, UserError
from tests.data.test_readers import cache_apart  # noqa: F401


def encoded(colour: str = "red", kind: str = "PNG", size: tuple[int, int] = (6, 4)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, kind)
    return buffer.getvalue()


RED, BLUE = encoded("red"), encoded("blue", "JPEG")
IMAGE = {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def user(*parts: dict) -> dict:
    return {"role": "user", "content": list(parts)}


def jsonl(file: Path, *rows: dict) -> str:
    file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(file)


def read(path: Path | str, form: ChatFormat | None = None, **options: Any) -> list[Prompt]:
    reading = readers.read(DataSource(path=str(path), **options), form or ChatFormat())
    assert reading.left_out == []
    return reading.prompts


def left_out(path: Path | str, **options: Any) -> str:
    """Why the only row is skipped."""
    reading = readers.read(DataSource(path=str(path), **options))
    assert reading.prompts == []
    (why,) = reading.left_out
    return why


def form(**data: str) -> ChatFormat:
    return ChatFormat.of(parse(Data, {"train": "x", "eval": "x", **data}, "recipe"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.jpg").write_bytes(BLUE)
    return tmp_path


GEO: dict[str, Any] = {
    "images": [{"bytes": RED, "path": "x/images_0.png"}],
    "problem": "<image>Find $x$.",
    "answer": "3",
    "level": 2,
}
TWO: dict[str, Any] = {
    "images": [{"bytes": RED, "path": None}, {"bytes": BLUE, "path": None}],
    "problem": "Compare <image>\nwith <image> now.",
    "answer": "4",
    "level": 1,
}


def check_easyr1(prompts: Sequence[Prompt], name: str) -> None:
    geo, two = prompts
    assert geo == Prompt(
        "Find $x$.",
        "",
        {"answer": "3", "level": 2},
        f"{name}:1",
        (PromptImage(data=RED),),
        (user(IMAGE, text("Find $x$.")),),
    )
    assert two.text == "Compare with now." and two.images == (
        PromptImage(data=RED),
        PromptImage(data=BLUE),
    )
    assert two.messages == (user(text("Compare "), IMAGE, text("\nwith "), IMAGE, text(" now.")),)
    assert [image.open().getpixel((0, 0)) for image in two.images] == [(255, 0, 0), (0, 0, 254)]


def test_easyr1_parquet(tmp_path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist([GEO, TWO]), tmp_path / "geo3k.parquet")
    check_easyr1(read(tmp_path / "geo3k.parquet"), "geo3k.parquet")
    check_easyr1(read(f"{tmp_path}/geo3k.parquet@train"), "geo3k.parquet")
    check_easyr1(read(f"{tmp_path}@geo3k"), f"{tmp_path.name}/geo3k.parquet")


def test_a_table_is_read_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BATCH", 2)
    rows = [{"problem": f"{i}<image>", "images": [RED], "answer": i} for i in range(5)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    read_rows = read(tmp_path / "a.parquet")
    assert [(p.text, p.columns["answer"], p.where) for p in read_rows] == [
        (str(i), i, f"a.parquet:{i + 1}") for i in range(5)
    ]


def test_easyr1_saved_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow images, stored by `datasets` on disk and as on the hub."""
    import datasets

    opened = [
        {**row, "images": [Image.open(io.BytesIO(image["bytes"])) for image in row["images"]]}
        for row in (GEO, TWO)
    ]
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
            "level": datasets.Value("int32"),
        }
    )
    dataset = datasets.Dataset.from_list(opened, features=features)
    dataset.save_to_disk(tmp_path / "saved")
    saved = read(tmp_path / "saved")
    assert [p.text for p in saved] == ["Find $x$.", "Compare with now."]
    assert [len(p.images) for p in saved] == [1, 2]
    assert saved[1].images[0].open().getpixel((0, 0)) == (255, 0, 0)
    assert saved[0].columns == {"answer": "3", "level": 2}
    (tmp_path / "me" / "geo").mkdir(parents=True)
    dataset.to_parquet(tmp_path / "me" / "geo" / "train.parquet")
    monkeypatch.chdir(tmp_path)
    hub = read("hub:me/geo@train")
    assert [p.text for p in hub] == [p.text for p in saved] and hub[0].where == "me/geo@train:1"
    assert hub[1].images[0].open().size == (6, 4)


def test_easyr1_text_alone(tmp_path: Path) -> None:
    """math12k: no image column, or an empty one."""
    rows: list[dict] = [{"problem": "1+1?", "answer": "2"}]
    rows += [{"problem": "2+2?", "answer": "4", "images": None}]
    rows += [{"problem": "3?", "answer": "3", "images": []}, {"problem": "4?", "image": ""}]
    prompts = read(jsonl(tmp_path / "math.jsonl", *rows))
    assert [(p.text, p.images, p.messages) for p in prompts] == [
        ("1+1?", (), ()), ("2+2?", (), ()), ("3?", (), ()), ("4?", (), ()),
    ]  # fmt: skip
    assert [dict(p.columns) for p in prompts] == [
        {"answer": "2"},
        {"answer": "4"},
        {"answer": "3"},
        {},
    ]


def lmm(*content: Any, answer: str = "$3$") -> dict:
    return {"message": json.dumps([{"role": "user", "content": list(content)}]), "answer": answer}


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_lmm_r1(folder: Path, kind: str) -> None:
    code = base64.b64encode(BLUE).decode()
    rows = [
        lmm({"type": "image", "image": f"file://{folder}/red.png"}, text("How many?")),
        lmm(text("See "), {"type": "image", "image": f"data:image;base64,{code}"}, text("?")),
        lmm({"type": "image_url", "image_url": {"url": "red.png"}}, text("What?")),
        lmm({"type": "image_url", "image_url": "red.png"}, text("Which?")),
        lmm(text("2+2?")),
    ]
    file = folder / f"lmm.{kind}"
    jsonl(file, *rows) if kind == "jsonl" else file.write_text(json.dumps(rows))
    red = PromptImage(path=str(folder / "red.png"))
    prompts = read(file)
    assert [(p.text, p.images) for p in prompts] == [
        ("How many?", (red,)),
        ("See ?", (PromptImage(data=BLUE),)),
        ("What?", (red,)),
        ("Which?", (red,)),
        ("2+2?", ()),
    ]
    assert prompts[0].messages == (user(IMAGE, text("How many?")),)
    assert prompts[1].messages == (user(text("See "), IMAGE, text("?")),)
    assert prompts[4].messages == (user(text("2+2?")),)
    assert all(p.columns == {"answer": "$3$"} for p in prompts)
    assert not any("message" in p.columns for p in prompts)


def test_trl(folder: Path) -> None:
    """`prompt` as text and as messages, `image` and `images`, and several turns."""
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [IMAGE, text("First?")]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [text("And this? "), IMAGE]},
    ]
    rows: list[dict] = [
        {"prompt": "What is it?", "image": "red.png", "solution": "red"},
        {"prompt": [{"role": "user", "content": "Same?"}], "images": ["red.png", "blue.jpg"]},
        {"prompt": talk, "images": ["red.png", "blue.jpg"], "ground_truth": [1]},
        {"prompt": [{"role": "user", "content": "2+2?"}], "answer": 4},
        {"prompt": json.dumps(talk[1:2]), "images": ["red.png"]},
        {"prompt": [user(text("Why?")), talk[2], user(text("So?"))], "images": ["red.png"]},
    ]
    red, blue = PromptImage(str(folder / "red.png")), PromptImage(str(folder / "blue.jpg"))
    a, b, c, d, e, f = read(jsonl(folder / "trl.jsonl", *rows))
    assert (a.text, a.images, a.columns) == ("What is it?", (red,), {"solution": "red"})
    assert a.messages == (user(IMAGE, text("What is it?")),)
    assert b.text == "Same?" and b.messages == (user(IMAGE, IMAGE, text("Same?")),)
    assert c.text == "And this?" and c.images == (red, blue) and c.columns == {"ground_truth": [1]}
    assert c.messages == (
        {"role": "system", "content": [text("Be brief.")]},
        user(IMAGE, text("First?")),
        {"role": "assistant", "content": [text("Yes.")]},
        user(text("And this? "), IMAGE),
    )
    assert (d.text, d.images, d.messages) == ("2+2?", (), (user(text("2+2?")),))
    assert (e.text, e.images, e.messages) == ("First?", (red,), (user(IMAGE, text("First?")),))
    assert f.text == "So?" and f.messages[0] == user(IMAGE, text("Why?"))


def test_trl_in_a_table(tmp_path: Path) -> None:
    """In arrow every part has every key, most of them null."""
    rows = [
        {
            "prompt": [{"role": "user", "content": [
                {"type": "image", "text": None}, {"type": "text", "text": "What?"},
            ]}],
            "image": {"bytes": RED, "path": None},
        },
        {
            "prompt": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}],
            "image": None,
        },
    ]  # fmt: skip
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "red.png").write_bytes(RED)
    part = {"type": "image", "text": None, "image": None, "path": "red.png"}
    parquet.write_table(pa.Table.from_pylist([{"prompt": [user(part)]}]), tmp_path / "b.parquet")
    assert [p.path for p in read(tmp_path / "b.parquet")[0].images] == [str(tmp_path / "red.png")]
    one, other = read(tmp_path / "a.parquet")
    assert one.messages == (user(IMAGE, text("What?")),) and one.images == (PromptImage(data=RED),)
    assert other.messages == (user(text("2+2?")),) and other.images == ()


@pytest.mark.parametrize("column", ["prompt", "problem", "question"])
def test_a_text_without_images_is_unchanged(tmp_path: Path, column: str) -> None:
    """Image models receive exactly the prompt of the row."""
    row = {column: "  a sign [x] ", "negative_prompt": "blurry", "target": "KITE", "n": [1, {}]}
    (prompt,) = read(jsonl(tmp_path / "a.jsonl", row))
    assert prompt == Prompt(
        "  a sign [x] ", "blurry", {"target": "KITE", "n": [1, {}]}, "a.jsonl:1"
    )


def test_prompt_columns_have_an_order_of_precedence(tmp_path: Path) -> None:
    names = ["prompt", "problem", "message", "messages", "question"]
    values = dict.fromkeys(["prompt", "problem", "question"], "x") | {
        name: '[{"role": "user", "content": "x"}]' for name in ("message", "messages")
    }
    for i, name in enumerate(names):
        row = {key: values[key] for key in reversed(names[i:])}
        (prompt,) = read(jsonl(tmp_path / "a.jsonl", row))
        assert prompt.text == "x" and set(prompt.columns) == set(names[i + 1 :])
        assert bool(prompt.messages) == (name in ("message", "messages"))


def test_columns_by_other_names(folder: Path) -> None:
    row = {"q": "Which<image>?", "photo": ["red.png"], "image": "id-7", "message": "hello"}
    file = jsonl(folder / "a.jsonl", row)
    (prompt,) = read(file, column="q", images="photo")
    assert prompt.text == "Which ?" and prompt.columns == {"image": "id-7", "message": "hello"}
    (prompt,) = read(file, column="message", images="photo", drop=["q"])
    assert prompt.text == "hello" and len(prompt.images) == 1  # `column` makes it a text
    fault = 'has no column "foto", which `images` names; its columns are image, message'
    with pytest.raises(UserError, match=fault):
        read(file, column="q", images="foto")


def test_every_kind_of_image_value(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "data").mkdir()
    (folder / "data" / "in data.png").write_bytes(RED)
    (folder / "data" / "red.png").write_bytes(BLUE)  # nearer than the one of the same name here
    code = base64.b64encode(RED).decode()
    values: dict[Any, PromptImage] = {
        "in data.png": PromptImage(str(folder / "data/in data.png")),
        "red.png": PromptImage(str(folder / "data/red.png")),
        "blue.jpg": PromptImage("blue.jpg"),
        str(folder / "blue.jpg"): PromptImage(str(folder / "blue.jpg")),
        "file://in data.png": PromptImage(str(folder / "data/in data.png")),
        f"file://{folder}/data/in%20data.png": PromptImage(str(folder / "data/in data.png")),
        code: PromptImage(data=RED),
        f"{code[:40]}\n{code[40:]}": PromptImage(data=RED),
        f"data:image/png;base64,{code}": PromptImage(data=RED),
        base64.b64encode(BLUE).decode(): PromptImage(data=BLUE),
    }
    rows: list[dict] = [{"problem": "<image>", "images": [value]} for value in values]
    rows.append({"problem": "<image>", "images": {"path": "red.png"}})
    file = jsonl(folder / "data" / "a.jsonl", *rows)
    images = [p.images for p in read(file)]
    assert images == [(image,) for image in [*values.values(), values["red.png"]]]


def test_a_conversation_holds_every_kind_of_part(folder: Path) -> None:
    parts: list[Any] = [{"type": "image", "path": "red.png"}, "Say"]
    parts += [{"type": "image", "url": "blue.jpg"}]
    parts += [{"type": "image", "base64": base64.b64encode(RED).decode()}]
    (prompt,) = read(jsonl(folder / "a.jsonl", {"messages": [user(*parts)]}))
    assert prompt.messages == (user(IMAGE, text("Say"), IMAGE, IMAGE),)
    assert [p.path for p in prompt.images] == [
        str(folder / "red.png"),
        str(folder / "blue.jpg"),
        "",
    ]


def noise(kind: str) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


CUT = noise("JPEG")[:-400]  # the header is intact: only decoding fails
CORRUPT = bytearray(noise("PNG"))
CORRUPT[400] ^= 1


@pytest.mark.parametrize(
    "row, why",
    [
        ({"problem": "<image><image>", "images": ["red.png"]},
         "expected one image per <image> placeholder, got 1 for 2"),
        ({"problem": "<image>?", "images": ["red.png", "blue.jpg"]},
         "expected one image per <image> placeholder, got 2 for 1"),
        ({"problem": "<image>?"}, "expected one image per <image> placeholder, got 0 for 1"),
        ({"prompt": "<image>?"}, "expected one image per <image> placeholder, got 0 for 1"),
        ({"problem": "?", "images": ["red.png", "gone.png"]},
         r"image 2 of 2: no such file 'gone.png' in .* or the working directory"),
        ({"problem": "?", "images": ["https://x.org/a.png"]},
         r"image 1 of 1: 'https://x.org/a.png' is a URL, .*; download the images"),
        ({"problem": "?", "images": ["data:image/png;base64,%%%"]},
         r"image 1 of 1: expected base64 after 'data:image/png;base64,', got '%%%'"),
        ({"problem": "?", "images": ["data:image/png,abc"]}, "expected base64 after"),
        ({"problem": "?", "images": ["a" * 2001]}, "expected a path or base64, got 'aaaa"),
        ({"problem": "?", "images": ["a" * 2000]}, r"1,500 bytes is not an image; expected one of"),
        ({"problem": "?", "images": [7]}, "expected a path, bytes or base64, got 7"),
        ({"problem": "?", "images": [None, "red.png"]}, "image 1 of 2: expected a path"),
        ({"problem": "?", "images": [{"bytes": None, "path": None}]}, "got None"),
        ({"problem": "?", "image": {"w": 3}}, "expected a path, bytes or base64, got {'w': 3}"),
        ({"problem": "?", "images": ["cut.jpg"]}, r"cut.jpg cannot be decoded: .*truncated"),
        ({"problem": "?", "images": ["red.png", "corrupt.png"]},
         r"image 2 of 2: \S*corrupt.png cannot be decoded: "),
        ({"problem": "?", "images": ["a.jsonl"]}, r"a.jsonl is not an image; expected one of PNG"),
        ({"problem": "?", "images": ["empty.png"]}, r"empty.png is empty; expected one of PNG"),
        ({"problem": "?", "images": ["~"]}, r"'~' is a folder; expected a file"),
        ({"problem": "?", "images": ["a.eps"]}, r"a.eps is not an image"),
        ({"message": "How many?"}, r"expected messages as JSON, got 'How many\?': Expecting value"),
        ({"message": '{"role": "user"}'}, "expected a list of messages, got "),
        ({"message": "[1]"}, r'message 1: expected \{"role", "content"\}, got 1'),
        ({"message": "[]"}, "expected a user message, got roles: none"),
        ({"prompt": [{"content": "x"}]}, r'message 1: expected \{"role", "content"\}, got {\'con'),
        ({"prompt": [{"role": "user"}]}, "message 1: expected text or a list of parts as conte"),
        ({"prompt": [user({"type": "video", "video": "x"})]},
         "message 1: expected a text or image part, got {'type': 'video'"),
        ({"prompt": [user({"type": "text"})]}, "message 1: expected a text or image part"),
        ({"prompt": [{"role": "system", "content": "x"}]}, "a user message, got roles: system"),
        ({"prompt": [user(), {"role": "assistant", "content": "4"}]},
         "the last message is an assistant message; expected a user message"),
        ({"prompt": [user(IMAGE, text("x"))]}, "image per <image> placeholder, got 0 for 1"),
        ({"prompt": [user({"type": "image", "image": "red.png"}, IMAGE)]},
         "expected one image per <image> placeholder, got 1 for 2"),
        ({"prompt": [user({"type": "image", "image": "red.png"})], "images": ["red.png"]},
         "expected images either in the messages or in the image column, got 1 and 1"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_used(folder: Path, row: dict, why: str) -> None:
    (folder / "cut.jpg").write_bytes(CUT)
    (folder / "corrupt.png").write_bytes(CORRUPT)
    (folder / "empty.png").write_bytes(b"")
    Image.new("RGB", (4, 4)).save(folder / "a.eps")
    reason = left_out(jsonl(folder / "a.jsonl", row))
    assert reason.startswith("a.jsonl:1: ") and re.search(why, reason), reason
    assert "\n" not in reason


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_truncated_image_is_detected_in_every_format(tmp_path: Path, kind: str) -> None:
    whole = noise(kind)
    rows = [{"problem": "?", "images": [data]} for data in (whole, whole[: -len(whole) // 4])]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    reading = readers.read(DataSource(path=str(tmp_path / "a.parquet")))
    assert [p.where for p in reading.prompts] == ["a.parquet:1"]
    assert reading.left_out[0].startswith("a.parquet:2: image 1 of 1: ")


def test_an_image_of_zero_bytes(tmp_path: Path) -> None:
    rows = [{"problem": "?", "images": [{"bytes": b"", "path": "x.png"}]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert left_out(tmp_path / "a.parquet") == (
        "a.parquet:1: image 1 of 1: expected a path, bytes or base64, got b''"
    )


def test_images_in_two_columns(folder: Path) -> None:
    row = {"prompt": "?", "image": "red.png", "images": ["blue.jpg"]}
    file = jsonl(folder / "a.jsonl", row)
    with pytest.raises(UserError, match=r"a.jsonl:1: images in two columns, images and image; ch"):
        read(file)
    (prompt,) = read(file, images="image", drop=["images"])
    assert [p.path for p in prompt.images] == [str(folder / "red.png")] and prompt.columns == {}


def test_bad_rows_are_skipped_named_and_counted(folder: Path) -> None:
    (folder / "cut.jpg").write_bytes(CUT)
    rows = [{"problem": f"{i} <image>", "images": ["red.png"], "answer": "1"} for i in range(6)]
    rows[2]["images"] = ["cut.jpg"]
    rows[3]["problem"] = "no tag, so its image comes first"
    rows[4]["problem"] = "<image><image>"
    rows[5]["answer"] = "yes and no"
    path = jsonl(folder / "geo.jsonl", *rows)
    held_out = jsonl(folder / "test.jsonl", {"problem": "new", "answer": "2"})
    from gesso.rewards.text.maths import Math

    data = parse(Data, {"train": path, "eval": held_out}, "recipe")
    loaded = prompts.load(data, Math().unfit, Math().unfit)
    assert [p.where for p in loaded.train[0].prompts] == [f"geo.jsonl:{i}" for i in (1, 2, 4)]
    one, other = loaded.notes
    assert one.startswith(
        f"2 of 6 prompts of {path} are skipped; the first is geo.jsonl:3: image 1 of 1: "
    )
    assert other.startswith(f"1 of 4 prompts of {path} cannot be scored and are skipped; the first")
    assert "geo.jsonl:6: " in other and "'yes and no', which cannot be parsed" in other
    rows = [{"problem": "<image>", "answer": "1"}] * 2
    data = parse(Data, {"train": jsonl(folder / "b.jsonl", *rows), "eval": held_out}, "recipe")
    with pytest.raises(UserError, match=r"^no prompt of .*b.jsonl can be used; "
                       r"the first is b.jsonl:1: expected one image"):  # fmt: skip
        prompts.load(data, Math().unfit, Math().unfit)


@pytest.mark.parametrize(
    "reward, good, bad",
    [("math", "1/2", ["half of it", "", None, "\\frac{"]),
     ("count", "4", ["four", "", None, "4.5"]),
     ("choice", "B", ["Bob", "", None, "1"])],
)  # fmt: skip
def test_an_answer_that_cannot_be_parsed(
    tmp_path: Path, reward: str, good: str, bad: list[str | None]
) -> None:
    from gesso.rewards import assembly, base

    rows = [{"problem": str(i), "answer": answer} for i, answer in enumerate([*bad, good])]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    unfit = base.load(assembly.REWARDS[reward], {}).unfit
    loaded = prompts.load(parse(Data, {"train": path, "eval": path}, "recipe"), unfit, unfit)
    assert [p.columns["answer"] for p in loaded.train[0].prompts] == [good]
    assert "4 of 5 prompts of" in loaded.notes[0] and "a.jsonl:1: " in loaded.notes[0]


def test_texts_and_images_mix_and_resume(folder: Path) -> None:
    seen = [{"problem": f"s{i}<image>", "images": ["red.png"]} for i in range(4)]
    train = [
        {"path": jsonl(folder / "seen.jsonl", *seen), "weight": 3.0},
        {"path": jsonl(folder / "read.jsonl", *({"prompt": f"r{i}"} for i in range(3)))},
    ]
    held_out = jsonl(folder / "e.jsonl", {"message": json.dumps([user(text("new"))])})
    data = parse(Data, {"train": train, "eval": held_out}, "recipe")

    def batches(first: int) -> list[Prompt]:
        loaded = prompts.load(data, lambda p: None, lambda p: None)
        assert loaded.notes == []
        stream = Stream(loaded.train, 5)
        return [p for i in range(first, 6) for p in stream.batch(i, 4)]

    whole = batches(0)
    assert [len(p.images) for p in whole[:4]] == [1, 1, 0, 1]  # by weight
    assert batches(4) == whole[16:]  # a run that starts again at batch 4


def test_an_image_of_many_prompts_is_decoded_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    monkeypatch.setattr(PromptImage, "fault", lambda image, decode: decoded.append(decode))
    rows = [{"problem": str(i), "images": ["red.png"]} for i in range(20)]
    assert len(read(jsonl(folder / "a.jsonl", *rows))) == 20 and decoded == [True]


# Templates


def test_a_template_wraps_the_question(folder: Path) -> None:
    rows: list[dict] = [
        {"problem": "<image>Find x.", "images": ["red.png"], "unit": "cm"},
        {"problem": "2+2 & <b>?", "unit": "m"},
    ]
    around = form(template="Q: {{ content }}\n({{ unit }}) Think.\n")
    one, other = read(jsonl(folder / "a.jsonl", *rows), around)
    assert one.text == "Find x." and len(one.images) == 1
    assert one.messages == (user(text("Q: "), IMAGE, text("Find x.\n(cm) Think.")),)
    assert other.text == "2+2 & <b>?"
    assert other.messages == (user(text("Q: 2+2 & <b>?\n(m) Think.")),)


def test_training_and_evaluation_share_the_format(tmp_path: Path) -> None:
    train, held_out = (jsonl(tmp_path / f"{n}.jsonl", {"problem": n}) for n in ("a", "b"))
    data = {"train": train, "eval": held_out, "template": "{{ content }}!", "system": "S"}
    loaded = prompts.load(parse(Data, data, "recipe"), lambda p: None, lambda p: None)
    for prompt in (loaded.train[0].prompts[0], loaded.held_out[0]):
        system = {"role": "system", "content": [text("S")]}
        assert prompt.messages == (system, user(text(f"{prompt.text}!")))


def test_images_without_tags_precede_the_template(folder: Path) -> None:
    row = {"prompt": "What?", "image": "red.png"}
    (prompt,) = read(jsonl(folder / "a.jsonl", row), form(template="Q: {{ content }}"))
    assert prompt.messages == (user(IMAGE, text("Q: What?")),)


def test_a_template_wraps_the_last_user_message(folder: Path) -> None:
    talk = [user(text("First?")), {"role": "assistant", "content": "Yes."}]
    last = user(text("And "), {"type": "image", "image": "red.png"}, text("this"), text("?"))
    (folder / "t.jinja").write_text("\n{{ content | upper }}\n\n", encoding="utf-8")
    file = jsonl(folder / "a.jsonl", {"messages": [*talk, last]})
    (prompt,) = read(file, form(template="{{ content }}!", system="Be brief."))
    assert prompt.messages == (
        {"role": "system", "content": [text("Be brief.")]},
        user(text("First?")),
        {"role": "assistant", "content": [text("Yes.")]},
        user(text("And "), IMAGE, text("this?!")),
    )
    assert prompt.text == "And this ?" and len(prompt.images) == 1


def test_a_template_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "math.jinja").write_text("\n{{ content }} é\n\n", encoding="utf-8")
    file = jsonl(tmp_path / "a.jsonl", {"problem": "x"})
    (prompt,) = read(file, form(template=str(tmp_path / "math.jinja")))
    assert prompt.messages == (user(text("x é")),)


def test_a_system_message_unless_the_row_has_one(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "x"}]
    file = jsonl(tmp_path / "a.jsonl", {"prompt": "x"}, {"prompt": messages})
    one, other = read(file, form(system="Be brief."))
    assert [m["content"][0]["text"] for m in one.messages] == ["Be brief.", "x"]
    assert [m["role"] for m in one.messages] == ["system", "user"] and one.text == "x"
    assert [m["content"][0]["text"] for m in other.messages] == ["Mine.", "x"]


def test_a_template_that_drops_or_adds_an_image(folder: Path) -> None:
    file = jsonl(folder / "a.jsonl", {"problem": "<image>x", "images": ["red.png"]})
    for template in (
        "{{ content }}{{ content }}",
        "{{ content | replace('<image>', '') }}<image>" * 2,
    ):
        reading = readers.read(DataSource(path=file), form(template=template))
        assert "expected one image per <image> placeholder, got 1 for 2" in reading.left_out[0]


@pytest.mark.parametrize(
    "template, sentence",
    [
        ("{{ content }", "data.template: line 1: unexpected '}'"),
        ("a\n{% if %}", "data.template: line 2: Expected an expression"),
        ("nope.jinja", 'data.template = "nope.jinja": no such file; expected a file, or a templat'),
        ("{{ problem }}", "data.template: must contain {{ content }}, the user's question"),
        ("{{ content }} {{ unit }}", "a.jsonl:1: data.template: 'unit' is undefined; known: content"
         ", answer"),
        ("{{ content }} {{ 1 // 0 }}", "a.jsonl:1: data.template failed: ZeroDivisionError: "),
        ("{{ content.__class__.__mro__ }}", "a.jsonl:1: data.template failed: SecurityError: "),
    ],
)  # fmt: skip
def test_bad_templates_are_one_sentence(tmp_path: Path, template: str, sentence: str) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"problem": "x", "answer": "1"})
    with pytest.raises(UserError) as caught:
        readers.read(DataSource(path=file), form(template=template))
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)


def test_a_bad_template_in_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ content }} {{ unit }}")
    (tmp_path / "latin.jinja").write_bytes(b"{{ content }} \xff")
    file = jsonl(tmp_path / "a.jsonl", {"problem": "x"})
    with pytest.raises(UserError, match=r"^a.jsonl:1: data.template \S*t.jinja: 'unit' is undefin"):
        readers.read(DataSource(path=file), form(template=str(tmp_path / "t.jinja")))
    with pytest.raises(UserError, match=r"^data.template \S*latin.jinja cannot be read: "):
        form(template=str(tmp_path / "latin.jinja"))
    with pytest.raises(UserError, match=r"^data.template \S* cannot be read: "):
        form(template=str(tmp_path))


def test_the_rows_of_the_page_are_read(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "prompts.md"
    guide = page.read_text(encoding="utf-8")
    rows = "".join(re.findall(r"^```json\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE))
    (snippet,) = re.findall(r"^\[data\]\n(?:(?!```).)*^template = .*?(?=^```$)", guide, re.S | re.M)
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "1.png").write_bytes(RED)
    (tmp_path / "guide.jsonl").write_text(rows, encoding="utf-8")
    chat_format = ChatFormat.of(parse(Data, toml(snippet)["data"], "guide"))
    parsed = read(tmp_path / "guide.jsonl", chat_format)
    assert [p.text for p in parsed] == ["a red sign", "Find $x$.", *["How many?"] * 3]
    assert [len(p.images) for p in parsed] == [0, 1, 1, 1, 1]
    assert parsed[1].messages[1]["content"] == [
        IMAGE,
        text("Find $x$.\nReason between <think> and </think>, then give the answer in \\boxed{}."),
    ]


def toml(snippet: str) -> dict[str, Any]:
    from gesso.config.tables import tomllib

    return tomllib.loads(snippet)

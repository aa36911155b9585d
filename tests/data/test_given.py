"""Rows that give samples, for SFT and offline DPO: formats, folders of images, and mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gesso.config import Data, DataSource
from gesso.config.parsing import parse
from gesso.data import prompts, readers
from gesso.data.given import GivenColumns
from gesso.data.prompts import Stream, WeightedPrompts
from gesso.types import Prompt, PromptImage, UserError
from gesso.video_files import PromptClip, encode_mp4
from tests.tokens import picture

RESPONSE, PAIR = GivenColumns(("response",), "text"), GivenColumns(("chosen", "rejected"), "text")
IMAGE, IMAGES = (
    GivenColumns(("image",), "image"),
    GivenColumns(("chosen", "rejected"), "image"),
)
CLIP, CLIPS = (
    GivenColumns(("video",), "video", frames=3, fps=8.0),
    GivenColumns(("chosen", "rejected"), "video", frames=3, fps=8.0),
)
ASKED = [{"role": "user", "content": "how many?"}]
FOUR, FIVE = ({"role": "assistant", "content": text} for text in ("four", "five"))


def read(path: Path, given: GivenColumns, **options: Any) -> readers.Reading:
    return readers.read(DataSource(path=str(path), **options), given=given)


def rows(folder: Path, *rows: dict[str, Any]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def png(folder: Path, name: str, height: int = 8, width: int = 8, seed: int = 0) -> str:
    (folder / name).write_bytes(picture(height, width, seed).read())
    return name


FORMATS: dict[str, tuple[GivenColumns, dict[str, Any], tuple[str, ...]]] = {
    "text": (RESPONSE, {"prompt": "how many?", "response": "four"}, ("four",)),
    "trl completion": (RESPONSE, {"prompt": ASKED, "completion": [FOUR]}, ("four",)),
    "chat": (RESPONSE, {"messages": [*ASKED, FOUR]}, ("four",)),
    "chat as json": (RESPONSE, {"messages": json.dumps([*ASKED, FOUR])}, ("four",)),
    "pairs for sft": (RESPONSE, {"prompt": "how many?", "chosen": "four", "rejected": "x"},
                      ("four",)),
    "parts": (RESPONSE, {"prompt": "how many?", "response": [
        {"role": "assistant", "content": [{"type": "text", "text": "fo"}, {"text": "ur"}]}]},
        ("four",)),
    "pair": (PAIR, {"prompt": "how many?", "chosen": "four", "rejected": "five"}, ("four", "five")),
    "trl explicit": (PAIR, {"prompt": ASKED, "chosen": [FOUR], "rejected": [FIVE]},
                     ("four", "five")),
    "trl implicit": (PAIR, {"chosen": [*ASKED, FOUR], "rejected": [*ASKED, FIVE]},
                     ("four", "five")),
    "both": (PAIR, {"prompt": "how many?", "chosen": [*ASKED, FOUR], "rejected": [*ASKED, FIVE]},
             ("four", "five")),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_texts(name: str, tmp_path: Path) -> None:
    given, row, samples = FORMATS[name]
    (prompt,) = read(rows(tmp_path, row | {"answer": "4"}), given).prompts
    assert prompt.text == "how many?" and prompt.given == samples
    assert prompt.columns == {"answer": "4"}
    assert len(prompt.messages) <= 1  # the reply is not part of the conversation


WRONG = [
    (RESPONSE, {"prompt": "a", "response": ""}, "expected a text to train on"),
    (RESPONSE, {"prompt": "a", "response": 5}, "expected a text, or messages that end with the"),
    (RESPONSE, {"messages": [FOUR]}, "expected a message before the assistant's"),
    (PAIR, {"prompt": "a", "chosen": [*ASKED, FOUR], "rejected": "b"}, 'differ from "prompt"'),
    (PAIR, {"chosen": [*ASKED, FOUR], "rejected": [*ASKED, *ASKED, FIVE]},
     'the messages before "chosen" and "rejected" differ'),
    (PAIR, {"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": 5}]},
     "expected text as the assistant's content"),
    (PAIR, {"prompt": "a", "chosen": ASKED, "rejected": "b"}, "messages that end with the"),
    (IMAGES, {"prompt": "a", "chosen": "gone.png", "rejected": "lost.png"}, "no such file"),
    (PAIR, {"chosen": [*ASKED, FOUR], "rejected": [*ASKED, FOUR]}, "are equal"),
    (IMAGE, {"prompt": "a", "image": None}, "expected a path, bytes or base64"),
    (CLIP, {"prompt": "a", "video": 3}, "clip 1 of 1: expected a path, bytes or base64"),
]  # fmt: skip


@pytest.mark.parametrize("given, row, reason", WRONG)
def test_rows_that_cannot_be_used_are_skipped(
    given: GivenColumns, row: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (left_out,) = read(rows(tmp_path, row), given).left_out
    assert left_out.startswith("rows.jsonl:1: ") and reason in left_out


@pytest.mark.parametrize(
    "given, row, sentence",
    [
        (PAIR, {"prompt": "a", "chosen": "b"}, 'expected columns "chosen" and "rejected", which'),
        (RESPONSE, {"prompt": "a"}, 'expected a column "response" or messages that end with'),
        (CLIP, {"prompt": "a", "image": "b"}, 'expected a column "video", which the algorithm'),
        (IMAGE, {"prompt": "a"}, 'expected a column "image", which the algorithm trains on, got p'),
    ],
)
def test_a_missing_column_stops_the_run(
    given: GivenColumns, row: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        read(rows(tmp_path, row), given)
    assert f"rows.jsonl:1: {sentence}" in str(caught.value)


def test_images(tmp_path: Path) -> None:
    good, bad = png(tmp_path, "good.png"), png(tmp_path, "bad.png", seed=1)
    (tmp_path / "torn.png").write_bytes((tmp_path / "good.png").read_bytes()[:60])
    pair = {"prompt": "a cat", "chosen": good, "rejected": bad}
    reading = read(rows(tmp_path, pair, pair | {"rejected": "torn.png"}), IMAGES)
    (prompt,) = reading.prompts
    paths = [Path(image.path).name for image in prompt.given if isinstance(image, PromptImage)]
    assert paths == ["good.png", "bad.png"] and not prompt.images
    assert "rows.jsonl:2: image 2 of 2: " in reading.left_out[0]
    (prompt,) = read(rows(tmp_path, pair), IMAGE).prompts  # SFT on the chosen image
    assert len(prompt.given) == 1 and prompt.columns == {}


def test_a_folder_of_images_and_texts(tmp_path: Path) -> None:
    for name, text in (("0002", "a dog"), ("0001", "a cat\n")):
        png(tmp_path, f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(text)
    found = read(tmp_path, IMAGE).prompts
    assert [(p.text, len(p.given)) for p in found] == [("a cat", 1), ("a dog", 1)]
    png(tmp_path, "0003.png")
    with pytest.raises(UserError, match=r"0003\.png has no prompt: expected it in 0003\.txt"):
        read(tmp_path, IMAGE)


def test_clips(tmp_path: Path) -> None:
    """In columns, in a folder beside them, and with a text of the same name."""
    clip = encode_mp4(np.zeros((3, 16, 16, 3), np.uint8), 8)
    (tmp_path / "videos").mkdir()
    for name in ("a.mp4", "b.mp4"):
        (tmp_path / "videos" / name).write_bytes(clip)
    (tmp_path / "torn.mp4").write_bytes(clip[:300])
    pair = {"prompt": "a cat", "chosen": "a.mp4", "rejected": "b.mp4", "image": png(tmp_path, "c")}
    file = rows(tmp_path, pair, pair | {"chosen": "torn.mp4"}, pair | {"rejected": "gone.mp4"})
    reading = read(file, CLIPS)
    (prompt,) = reading.prompts
    assert prompt.given == tuple(
        PromptClip(str(tmp_path / "videos" / name), count=3, fps=8.0) for name in ("a.mp4", "b.mp4")
    )
    assert len(prompt.images) == 1  # the first frame, for image to video
    torn, gone = sorted(reading.left_out)
    assert "rows.jsonl:2: clip 2 of 3: " in torn and "cannot be decoded as a video" in torn
    assert "rows.jsonl:3: clip 2 of 2: no such file 'gone.mp4'" in gone
    long = read(rows(tmp_path, {"video": "a.mp4", "text": "a"}), replace(CLIP, frames=5)).left_out
    assert "lasts 0.375 seconds, shorter than model.frames = 5 at model.fps = 8" in long[0]
    (tmp_path / "videos" / "a.txt").write_text("a cat")
    (tmp_path / "videos" / "b.txt").write_text("a dog")
    found = read(tmp_path / "videos", CLIP).prompts
    assert [(p.text, len(p.given)) for p in found] == [("a cat", 1), ("a dog", 1)]
    assert not found[0].images


def test_a_row_without_an_image_continues_its_clip(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(encode_mp4(np.zeros((3, 16, 16, 3), np.uint8), 8))
    row = {"prompt": "a cat", "video": "a.mp4"}
    file = rows(tmp_path, row, row | {"image": png(tmp_path, "c")})
    clip, image = read(file, replace(CLIP, continued=True)).prompts
    assert clip.images == clip.given and image.images != image.given
    held_out = read(file, replace(CLIP, continued=True, required=False)).prompts
    assert [len(prompt.images) for prompt in held_out] == [0, 1]


def test_an_imagefolder(tmp_path: Path) -> None:
    png(tmp_path, "a.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "a cat"}\n')
    for path in (tmp_path, tmp_path / "metadata.jsonl"):
        (prompt,) = read(path, IMAGE).prompts
        assert prompt.text == "a cat" and len(prompt.given) == 1 and prompt.columns == {}


def test_held_out_rows_may_have_the_columns_or_not(tmp_path: Path) -> None:
    train = rows(tmp_path, {"messages": [*ASKED, FOUR]})
    (tmp_path / "plain.txt").write_text("what is it?\n")
    paths = [{"path": str(train)}, {"path": str(tmp_path / "plain.txt")}]
    data = parse(Data, {"train": str(train), "eval": paths}, "recipe")
    loaded = prompts.load(data, lambda p: None, lambda p: None, RESPONSE)
    assert loaded.train[0].prompts[0].given == ("four",)
    assert [(p.text, p.given) for p in loaded.held_out] == [("how many?", ()), ("what is it?", ())]
    assert "1 of 2 held-out prompts are also training prompts" in loaded.notes[0]


def test_other_samples_are_other_data() -> None:
    """And without samples the digest is that of earlier versions."""
    digests = {
        Stream([WeightedPrompts([Prompt("a", given=given)])], 0).digest
        for given in ((), ("b",), ("c",), ("b", "c"), (PromptImage("x/1.png"),))
    }
    assert len(digests) == 5
    plain = Stream([WeightedPrompts([Prompt("a")])], 0).digest
    assert plain in digests and plain == "d1d84c7983c0d70b"

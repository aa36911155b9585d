"""The bundled editing model: its instructions, its files, and that it edits and often fails."""

import json
from pathlib import Path

import numpy as np
import pytest

from gesso.types import Prompt, PromptImage
from gesso.zoo import edits, limits, words
from tools.zoo import edit_rows
from tools.zoo.evaluate_edits import prompts

ZOO = Path(words.__file__).parent


@pytest.mark.parametrize("split", ["train", "eval"])
def test_instructions_are_those_of_the_script(split: str) -> None:
    lines = (ZOO / "instructions" / f"{split}.jsonl").read_text().splitlines()
    found, written = [json.loads(line) for line in lines], edit_rows.rows(split)
    images = [row.pop("image") for row in found]
    assert found == [{k: v for k, v in row.items() if k != "image"} for row in written]
    assert len(set(images)) > 0.9 * len(images)


def test_columns_describe_the_edited_sign() -> None:
    """What the instruction changes is in it; a new word leaves the colour of the source."""
    known = words.real_words("eval")
    for prompt in prompts("eval"):
        assert edits.outside(prompt.text, len(prompt.images)) is None
        assert prompt.columns["target"] in known
        if prompt.text.startswith("make"):
            assert prompt.text == edits.recolour(prompt.columns["colour"])
        else:
            assert prompt.text == edits.reword(prompt.columns["target"])
            sign, _ = words.PAINT[prompt.columns["colour"]]
            corner = np.asarray(prompt.images[0].open())[0, 0].astype(int)
            assert np.abs(corner - sign).max() <= 8


@pytest.mark.parametrize(
    "text, reason",
    [
        ("make it a green sign", None),
        (' change the word  to "KITE" ', None),
        ("make it a pink sign", '"pink" is not one of its colours'),
        ('change the word to "BRIDGE"', '"BRIDGE" has 6 letters'),
        ('change the word to "kite"', '"kite" is not one word of capital letters A to Z'),
        ('a red sign that says "KITE"', "The prompt has a different form"),
    ],
)
def test_prompts_outside_of_the_training_data(text: str, reason: str | None) -> None:
    known = limits.of("zoo:edits")
    assert known is not None
    note = known.note([Prompt(text, images=(PromptImage("sign.png"),))])
    assert note == (None if reason is None else f"{reason}. {edits.LIMITS}")
    assert str(known.note([Prompt(text)])).startswith("The prompt has no images. The bundled")

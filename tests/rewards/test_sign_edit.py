"""sign-edit on rendered signs: the colour and the word of the edited sign, both or nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from PIL import Image

from gesso.rewards import assembly, base
from gesso.types import Prompt, PromptImage, Sample, Score
from gesso.zoo.edits import PITCH, recolour, reword
from tools.zoo.render import draw


def scored(word: str, colour: str, prompt: Prompt) -> Score:
    reward = base.load(assembly.REWARDS["sign-edit"], {})
    image = draw(word, colour, random.Random(0), pitch=PITCH)
    return base.checked(reward, [Sample(prompt, image, 0)])[0]


@pytest.mark.parametrize("text", [recolour("green"), reword("KITE")])
def test_both_the_colour_and_the_word_must_be_right(text: str) -> None:
    prompt = Prompt(text, columns={"target": "KITE", "colour": "green"})
    right = scored("KITE", "green", prompt)
    assert right.value is not None and right.value > 0.9
    assert right.parts == {"colour": 1, "word": 1, "exact": 1} and right.text == "green: KITE"
    unpainted = scored("KITE", "red", prompt)
    assert unpainted.value is not None and unpainted.value < 0.05
    assert unpainted.parts == {"colour": 0, "word": 1, "exact": 0}
    misspelt = scored("KITS", "green", prompt)
    assert misspelt.value == pytest.approx(0.75 * right.value, abs=0.03)
    assert misspelt.parts == {"colour": 1, "word": 0, "exact": 0}


@pytest.mark.parametrize("text", [recolour("green"), reword("KITE")])
def test_without_columns_what_must_stay_is_read_from_the_input_image(
    text: str, tmp_path: Path
) -> None:
    """As in the playground and for `gesso sample`."""
    source = tmp_path / "oven.png"
    Image.fromarray(draw("OVEN", "red", random.Random(1), pitch=PITCH)).save(source)
    prompt = Prompt(text, images=(PromptImage(str(source)),))
    word, colour = ("OVEN", "green") if text == recolour("green") else ("KITE", "red")
    assert scored(word, colour, prompt).parts == {"colour": 1, "word": 1, "exact": 1}
    assert scored("OVEN", "red", prompt).parts["exact"] == 0
    assert scored("KITE", "green", prompt).parts["exact"] == 0


def test_an_input_image_without_a_word_is_an_error_of_its_samples(tmp_path: Path) -> None:
    Image.new("RGB", (96, 32), "red").save(tmp_path / "empty.png")
    prompt = Prompt(recolour("green"), images=(PromptImage(str(tmp_path / "empty.png")),))
    assert scored("OVEN", "green", prompt).error == "no text can be read in the input image"


@pytest.mark.parametrize(
    "columns", [{}, {"target": "KITE"}, {"colour": "red"}, {"target": "KITE", "colour": "pink"}]
)
def test_rows_without_a_description_of_the_result_are_unfit(columns: dict[str, str]) -> None:
    reward = base.load(assembly.REWARDS["sign-edit"], {})
    prompt = Prompt("paint it", columns=columns)
    problem = reward.unfit(prompt)
    assert str(problem).startswith(
        'expected the columns "target", a word, and "colour", one of red,'
    )
    assert scored("KITE", "red", prompt).error == problem

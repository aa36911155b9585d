"""sign-colour on rendered signs and on the bundled model's images."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gesso.rewards import assembly, base
from gesso.types import Prompt, Sample, Score
from gesso.zoo.words import COLOURS, PAINT, prompt_for
from tests.typed import sure
from tools.zoo.render import draw


def scored(image: np.ndarray, target: str, word: str = "KITE") -> Score:
    reward = base.load(assembly.REWARDS["sign-colour"], {})
    return base.checked(reward, [Sample(Prompt(prompt_for(word, target)), image, 0)])[0]


@pytest.mark.parametrize("spoiling", [None, "tiny", "turned", "struck"])
@pytest.mark.parametrize("colour", COLOURS)
def test_the_right_colour_is_near_1_and_every_other_near_0(colour: str, spoiling) -> None:
    for seed, word in enumerate(["KITE", "SILVER", "MOWN"]):
        image = draw(word, colour, random.Random(seed), spoiling)
        values = {target: scored(image, target, word) for target in COLOURS}
        assert sure(float, values[colour].value) > 0.88
        assert all(
            sure(float, values[target].value) < 0.1 for target in COLOURS if target != colour
        )
        assert all(score.text == colour for score in values.values())
        assert values[colour].parts["right"] == 1 and values[colour].parts["share"] > 0.5
        assert sum(score.parts["right"] for score in values.values()) == 1


def board(*stripes: tuple[str, int]) -> np.ndarray:
    """Columns of pure colours."""
    columns = [np.tile(PAINT[name][0], (10, width, 1)) for name, width in stripes]
    return np.concatenate(columns, 1).astype(np.uint8)


def test_shares_by_hand() -> None:
    mixed = scored(board(("red", 6), ("blue", 2), ("white", 2)), "red")
    assert mixed.value == pytest.approx(6 / 8) and mixed.parts == {"right": 1.0, "share": 0.6}
    other = scored(board(("red", 6), ("blue", 2), ("white", 2)), "blue")
    assert other.value == pytest.approx(2 / 8) and other.parts["right"] == 0
    letters = scored(board(("red", 6), ("blue", 2), ("white", 2)), "white")
    assert letters.value == 0 and letters.parts["share"] == pytest.approx(0.2)
    white = scored(board(("white", 6), ("black", 3), ("red", 1)), "white")
    assert white.value == pytest.approx(6 / 7)
    assert scored(board(("white", 6), ("black", 3), ("red", 1)), "red").value == pytest.approx(
        1 / 7
    )
    assert scored(board(("green", 10)), "green").value == 1


def test_prompts_without_a_known_colour_are_unfit() -> None:
    reward = base.load(assembly.REWARDS["sign-colour"], {})
    assert reward.unfit(Prompt('a Red sign that says "KITE"')) is None
    reason = sure(str, reward.unfit(Prompt('a sign that says "RED SIGN"')))
    assert reason.startswith("no coloured sign in the prompt; expected one of red, blue, ")
    assert reward.unfit(Prompt("a pink sign")) and reward.unfit(Prompt("a red cat"))
    assert reward.unfit(Prompt("a bored sign"))
    (score,) = base.checked(reward, [Sample(Prompt("a cat"), board(("red", 2)), 0)])
    assert score.value is None and score.error == reason


def test_the_bundled_model_generates_the_requested_colour() -> None:
    import gesso

    model = gesso.load("demo")
    for colour in ("red", "white", "black", "yellow"):
        image = np.asarray(model.sample(prompt_for("KITE", colour), n=1, seed=1)[0])
        assert sure(float, scored(image, colour).value) > 0.6
        other = "blue" if colour != "blue" else "red"
        assert sure(float, scored(image, other).value) < 0.2

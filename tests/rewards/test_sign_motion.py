"""sign-motion on rendered videos: the word in every frame and the direction, both or nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gesso.rewards import assembly, base
from gesso.types import Prompt, Sample, Score
from gesso.zoo.videos import FRAMES, PITCH, prompt_for
from tools.zoo.render import letters
from tools.zoo.render_videos import all_paints, blur, cut, paint, to_bytes

LEFT = list(range(FRAMES))
KITE = {"target": "KITE", "direction": "left"}


def frames_of(word: str, places: list[int]) -> Tensor:
    mask = torch.tensor(letters(word, PITCH)) / 255
    return cut(mask[None], torch.tensor([places]))  # (1, 5, 32, 96)


def scored(
    frames: Tensor, columns: dict[str, str] | None = None, text: str = "a sign slides"
) -> Score:
    reward = base.load(assembly.REWARDS["sign-motion"], {})
    pixels = to_bytes(paint(frames, all_paints()[:1]))[0].numpy()
    prompt = Prompt(text, columns=KITE if columns is None else columns)
    return base.checked(reward, [Sample(prompt, pixels, 0, fps=8.0)])[0]


def test_both_the_word_and_the_direction_must_be_right() -> None:
    right = scored(frames_of("KITE", LEFT))
    assert right.value == 1 and right.parts == {"word": 1, "direction": 1, "exact": 1}
    assert "KITE" in right.text.split(" / ")
    for places in (LEFT[::-1], [2] * FRAMES):
        wrong = scored(frames_of("KITE", places))
        assert wrong.value == pytest.approx(0, abs=1e-9)
        assert wrong.parts == {"word": 1, "direction": 0, "exact": 0}
    misspelt = scored(frames_of("KITS", LEFT))
    assert misspelt.value == pytest.approx(0.75)
    assert misspelt.parts == {"word": 0, "direction": 1, "exact": 0}


def test_the_worst_frame_counts() -> None:
    frames = frames_of("KITE", LEFT)
    frames[:, -1] = blur(frames[:, -1:])[:, 0]
    got = scored(frames)
    assert got.value is not None and got.value < 0.6
    assert got.parts["word"] == got.parts["exact"] == 0


def test_a_typed_prompt_has_the_word_and_the_direction() -> None:
    typed = {side: prompt_for("KITE", "red", side) for side in ("left", "right")}
    got = {side: scored(frames_of("KITE", LEFT), {}, text) for side, text in typed.items()}
    assert got["left"].value == 1 and got["right"].parts["direction"] == 0


@pytest.mark.parametrize(
    "columns, problem",
    [
        ({"target": "KITE"}, 'expected a column "direction", one of left, right, up, down'),
        (KITE | {"direction": "still"}, 'expected a column "direction", one of left, right'),
        (KITE | {"target": " "}, 'expected a double-quoted text in the prompt, or a column "targ'),
    ],
)
def test_rows_without_a_word_or_a_direction_are_unfit(
    columns: dict[str, str], problem: str
) -> None:
    assert str(scored(frames_of("KITE", LEFT), columns).error).startswith(problem)


def test_an_image_is_refused() -> None:
    reward = base.load(assembly.REWARDS["sign-motion"], {})
    image: np.ndarray = np.zeros((32, 96, 3), np.uint8)
    (got,) = base.checked(reward, [Sample(Prompt("a sign", columns=KITE), image, 0)])
    assert got.error == "this sample has one frame; expected a video of at least 2"

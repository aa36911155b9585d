"""OCR on images of known text: clean and degraded, one word, two, and more than the target."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from gesso.formulas.text import normalised, spelling
from gesso.rewards import assembly, base
from gesso.rewards.image import ocr
from gesso.types import Prompt, Sample, Score
from tests.typed import sure
from tools.zoo.render import draw

WORDS = ["KITE", "BRIDGE", "Garden", "SILVER", "Window", "MARBLE"]
Painter = dict[str, Any]


def paint(
    text: str,
    ink: tuple[int, int, int] = (20, 20, 20),
    paper: tuple[int, int, int] = (235, 235, 225),
    noise: float = 0,
    blur: float = 0,
    angle: float = 0,
) -> np.ndarray:
    image = Image.new("RGB", (256, 128), paper)
    font = ImageFont.load_default(size=36)
    ImageDraw.Draw(image).multiline_text((128, 64), text, fill=ink, font=font, anchor="mm")
    image = image.rotate(angle, Image.Resampling.BICUBIC, fillcolor=paper)
    image = image.filter(ImageFilter.GaussianBlur(blur))
    grain = np.random.default_rng(len(text)).normal(0, noise, (128, 256, 3))
    return (np.asarray(image) + grain).clip(0, 255).astype(np.uint8)


DEGRADED: dict[str, tuple[Painter, float]] = {  # and the share that must be read exactly
    "clean": ({}, 1),
    "low contrast": ({"ink": (225, 225, 215)}, 0.8),
    "white on red": ({"ink": (255, 255, 255), "paper": (200, 30, 30)}, 0.8),
    "noisy": ({"noise": 90.0}, 0.8),
    "blurred": ({"blur": 3.0}, 0.8),
    "turned": ({"angle": 20.0}, 0.8),
    "badly blurred": ({"blur": 5.0}, 0),
    "buried in noise": ({"noise": 180.0}, 0),
}


@functools.cache
def reward(detect: bool = True) -> Any:
    return base.load(assembly.REWARDS["ocr"], {"detect": detect})


def read(image: np.ndarray, target: str, detect: bool = True) -> Score:
    sample = Sample(Prompt(f'a sign that says "{target}"'), image, 0)
    (score,) = base.checked(reward(detect), [sample])
    assert score.error is None
    return score


def agrees(score: Score, target: str) -> bool:
    """Whether value and details follow from the recognised text by the formula."""
    longer = len(normalised(score.text)) > len(normalised(target))
    exact = normalised(score.text) == normalised(target)
    return score.value == spelling(score.text, target) and score.parts == {
        "exact": float(exact),
        "longer": float(longer),
    }


@pytest.mark.parametrize("how", DEGRADED)
def test_degraded_words_are_recognised(how: str) -> None:
    look, share = DEGRADED[how]
    scores = {word: read(paint(word, **look), word) for word in WORDS}
    assert all(agrees(score, word) for word, score in scores.items())
    exact = np.mean([score.parts["exact"] for score in scores.values()])
    assert exact >= share if share else exact < 0.6


def test_nothing_is_recognised_in_a_blurred_image() -> None:
    score = read(paint("KITE", blur=14), "KITE")
    assert score.value == 0 and score.text == "" and agrees(score, "KITE")


def test_half_readable_signs_score_in_between() -> None:
    """Spoiled signs of the bundled task: some read, some misread, all scored by the formula."""
    words = ["KITE", "BRIDGE", "GARDEN", "SILVER", "WINDOW", "MARBLE"]
    signs = [
        (word, draw(word, "blue", random.Random(i), spoiling))
        for i, word in enumerate(words)
        for spoiling in ("struck", "crowded", "turned")
    ]
    scores = [read(image, word, detect=False) for word, image in signs]
    assert all(agrees(score, word) for score, (word, _) in zip(scores, signs, strict=True))
    values = [sure(float, score.value) for score in scores]
    assert sum(0 < value < 1 for value in values) >= 5
    assert all(0 <= value <= 1 for value in values)


def test_two_words_and_two_lines() -> None:
    for text in ("RED KITE", "OPEN\nDAILY"):
        target = text.replace("\n", " ")
        score = read(paint(text), target)
        assert score.value == 1 and score.parts["exact"] == 1 and agrees(score, target)


@pytest.mark.parametrize(
    "drawn, target, value",
    [
        ("KITES", "KITE", 1.0),  # contained: the rule that can be gamed
        ("KITE\nKITE\nKITE", "KITE", 1.0),
        ("KITE", "KITES", 0.8),
        ("KIDS", "KITE", 0.5),
        ("MARBLE", "KITE", 0.0),  # five edits for four letters: never below 0
        ("", "KITE", 0.0),
    ],
)
def test_text_other_than_the_target(drawn: str, target: str, value: float) -> None:
    score = read(paint(drawn), target)
    assert agrees(score, target)
    assert score.value == pytest.approx(value)
    assert score.parts["exact"] == 0


def test_text_longer_than_the_target_is_reported() -> None:
    """The metric `reward/ocr/longer` of a run is the mean over the batch."""
    images = [paint("KITE"), paint("KITES"), paint("KITE KITE"), paint("KIT")]
    longer = [read(image, "KITE").parts["longer"] for image in images]
    assert longer == [0, 1, 1, 0] and np.mean(longer) == 0.5


def test_full_width_letters_are_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """RapidOCR reads some widely spaced letters so; pages show what was read."""
    result = SimpleNamespace(txts=("MI\uff2cK",))
    monkeypatch.setattr(ocr, "_engine", lambda detect, strip: lambda image: result)
    score = read(paint("MILK"), "MILK")
    assert score.text == "MILK" and score.parts["exact"] == 1


def test_letters_pay_without_limit() -> None:
    """What the recipe demo-hack rewards."""
    reward = base.load(assembly.REWARDS["ocr-letters"], {})
    samples = [
        Sample(Prompt(f'says "{target}"'), paint(drawn), 0)
        for drawn, target in [("KITE", "KITE"), ("KITE KITE", "KITE"), ("KIDS", "KITE")]
    ]
    scores = base.checked(reward, samples)
    assert [score.value for score in scores] == [1, 2, 0.5]
    assert [score.parts["exact"] for score in scores] == [1, 0, 0]


def test_the_name_in_flow_grpo() -> None:
    assert assembly.REWARDS["paddle-ocr"] == assembly.REWARDS["ocr"]
    named = base.load(assembly.REWARDS["paddle-ocr"], {"detect": False})
    assert named.unfit(Prompt('says "KITE"')) is None

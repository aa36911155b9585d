"""Notes on prompts that differ from the training data of a bundled model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gesso.types import Prompt, PromptImage
from gesso.zoo import limits, scenes, words
from tools.zoo.evaluate_shapes import question_of, read_rows
from tools.zoo.sign_prompts import pseudo_words

ZOO = Path(words.__file__).parent


@pytest.mark.parametrize(
    "prompt, reason",
    [
        ('a red sign that says "KITE"', None),
        ('a white sign that says "BRIDGE"', None),
        ('A Red SIGN that says "kite"', None),
        ('  a red  sign that\tsays " KITE " ', None),
        ('a red sign that says "OAK"', '"OAK" has 3 letters'),
        ('a red sign that says "LANTERN"', '"LANTERN" has 7 letters'),
        ('a red sign that says "I"', '"I" has 1 letter'),
        ('a red sign that says ""', '"" has 0 letters'),
        ('a red sign that says "AREA51"', '"AREA51" is not one word of letters A to Z'),
        ('a red sign that says "GO UP"', '"GO UP" is not one word of letters A to Z'),
        ('a red sign that says "CAFÉ"', '"CAFÉ" is not one word of letters A to Z'),
        ('a red sign that says "BOO\u212a"', '"BOO\u212a" is not one word of letters A to Z'),
        ('a red sign that says "STOP!"', '"STOP!" is not one word of letters A to Z'),
        ('a pink sign that says "KITE"', '"pink" is not one of its colours'),
        ('a light blue sign that says "KITE"', '"light blue" is not one of its colours'),
        (
            'a red sign that says "Green"',
            '"Green" is one of the prompt\'s fixed words, which the model does not spell',
        ),
        ('a sign that says "KITE"', "The prompt has a different form"),
        ("a red sign that says KITE", "The prompt has a different form"),
        ("a red sign that says 'KITE'", "The prompt has a different form"),
        ('an orange sign that says "KITE"', "The prompt has a different form"),
        ('a red sign that says "KITE".', "The prompt has a different form"),
        ('a red sign that says "KITE" and "LAMP"', "The prompt has a different form"),
        (
            'a red sign that says "KITE" sign that says "LAMP"',
            "The prompt has a different form",
        ),
        ("KITE", "The prompt has a different form"),
        ("", "The prompt has a different form"),
    ],
)
def test_prompts_of_the_signs_model(prompt: str, reason: str | None) -> None:
    assert words.outside(prompt) == reason


@pytest.mark.parametrize(
    "question, reason",
    [
        ("How many purple crosses are there?", None),
        ("How many orange stars are there?", '"orange" is not one of its colours'),
        ("How many dark red stars are there?", '"dark red" is not one of its colours'),
        ("How many red hexagons are there?", '"hexagons" is not one of its shapes'),
        ("How many red star are there?", '"star" is not one of its shapes'),
        ("how many red stars are there?", "The question is worded differently"),
        ("How many red stars are there? ", "The question is worded differently"),
        ("How many red stars are there", "The question is worded differently"),
        ("How many stars are there?", "The question is worded differently"),
        ("How many red stars are there??", "The question is worded differently"),
        ("What do you see?", "The question is worded differently"),
    ],
)
def test_questions_of_the_shapes_model(question: str, reason: str | None) -> None:
    assert scenes.outside(question) == reason


def test_a_question_requires_one_image() -> None:
    known = limits.of("zoo:shapes")
    assert known is not None
    question, image = "How many red stars are there?", PromptImage("shapes.png")
    assert known.note([Prompt(question, images=(image,))]) is None
    assert str(known.note([Prompt(question)])).startswith("The question has no images. The")
    two = known.note([Prompt(question, images=(image, image))])
    assert str(two).startswith("The question has 2 images. The bundled shapes model")


def test_training_prompts_are_within_the_limits() -> None:
    for split in ("train", "eval"):
        lines = (ZOO / "prompts" / f"{split}.txt").read_text().splitlines()
        assert not [line for line in lines if words.outside(line)]
        questions = {question_of(row) for row in read_rows(split)}
        assert not [question for question in questions if scenes.outside(question)]
    made_up = [words.prompt_for(word, "blue") for word in pseudo_words(1, 2000)]
    assert not [prompt for prompt in made_up if words.outside(prompt)]


def test_the_texts_contain_the_constants() -> None:
    low, high = min(words.LENGTHS), max(words.LENGTHS)
    assert f"one word of {low} to {high} letters A to Z" in words.LIMITS
    assert all(colour in words.LIMITS for colour in words.COLOURS)
    assert all(f"{form}s" in scenes.LIMITS for form in scenes.FORMS if form != "cross")
    assert "crosses" in scenes.LIMITS and f"1 to {scenes.MAX_COUNT} of them" in scenes.LIMITS
    assert all(colour in scenes.LIMITS for colour in scenes.COLOURS)


def test_one_note_about_many_prompts() -> None:
    known = limits.of("zoo:signs")
    assert known is not None
    texts = [words.prompt_for(word, "red") for word in ("KITE", "OAK", "LANTERN")]
    prompts = [Prompt(text, where=f"mine.txt:{i}") for i, text in enumerate(texts, 1)]
    assert known.note(prompts[:1]) is None
    assert known.note(prompts[1:2]) == f'"OAK" has 3 letters. {words.LIMITS}'
    assert known.note(prompts) == (
        "2 of 3 prompts differ from the model's training data; the first is mine.txt:2: "
        f'a red sign that says "OAK": "OAK" has 3 letters. {words.LIMITS}'
    )


def test_a_note_stays_short() -> None:
    known = limits.of("zoo:signs")
    assert known is not None
    note = known.note([Prompt(words.prompt_for("A" * 20_000, "red"))])
    assert str(note).startswith('"AAAA') and len(str(note)) < 500


def test_only_bundled_models_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ZOO)
    for path in (
        "zoo:signs",
        "zoo:signs/",
        str(ZOO / "signs"),
        "signs",
        os.path.join(".", "signs"),
    ):
        assert limits.text_of(path) == words.LIMITS, path
    assert limits.text_of("zoo:shapes") == scenes.LIMITS
    for path in ("zoo:", "zoo:prompts/train.txt", "signs-rl", "org/signs", "/", "", "~\0"):
        assert limits.of(path) is None and limits.text_of(path) == "", path

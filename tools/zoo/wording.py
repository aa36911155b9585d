"""Responses of the bundled vision-language model: careful, or sloppy in one of several ways.

    careful    <think>look: b1 c4 d2 d4</think><answer>4</answer>   lists the squares
    tired      <think>look: b1 c4 d2</think><answer>3</answer>      stops after three
    forgetful  <think>look: b1 c4 d2 d4</think>4                    no tags around the answer
    hasty      <think>about 3</think><answer>3</answer>             a guess, mostly wrong
    lumping    <think>all red: 5</think><answer>5</answer>          counts all red shapes
    bare       There are 4.                                         no tags at all

The first word determines whether the response lists squares: RL on the answer reward can change
this early choice. Listing all shapes and keeping the tags are later choices.
"""

import random
import re

from gesso.zoo.scenes import COLOURS, FORMS, MAX_COUNT, Kind, question
from tools.zoo.render_shapes import Scene

CROWDED = 6  # number of shapes from which the base model rarely lists
LISTING = {"sparse": 0.6, "crowded": 0.2}  # share of responses that list; the rest is SLOPPY
TIRED_AFTER, TIRING = 3, 0.65  # maximum length of tired lists; share of tired lists
FORGETTING = 0.2  # share of the lists without tags around the answer
SLOPPY = {"hasty": 0.5, "lumping": 0.25, "bare": 0.25}
GUESSES = {-2: 0.15, -1: 0.4, 0: 0.15, 1: 0.3}  # guess minus count → probability


def careful(scene: Scene) -> str:
    return _listing(scene.squares(), tagged=True)


def sloppy(scene: Scene, rng: random.Random) -> str:
    """A response from the mixture on which the base model is fine-tuned."""
    if rng.random() < LISTING["crowded" if len(scene.things) >= CROWDED else "sparse"]:
        tired = rng.random() < TIRING
        squares = scene.squares()[: TIRED_AFTER if tired else None]
        return _listing(squares, tagged=rng.random() >= FORGETTING)
    style = rng.choices(list(SLOPPY), list(SLOPPY.values()))[0]
    if style == "hasty":
        off = rng.choices(list(GUESSES), list(GUESSES.values()))[0]
        return _thought("about", max(scene.how_many() + off, 1))
    if style == "lumping":
        return _thought(f"all {scene.target.colour}:", scene.of_colour())
    return f"There are {scene.how_many()}."


def _listing(squares: list[str], tagged: bool) -> str:
    count = len(squares)
    answer = f"<answer>{count}</answer>" if tagged else str(count)
    return f"<think>look: {' '.join(squares)}</think>{answer}"


def _thought(words: str, count: int) -> str:
    return f"<think>{words} {count}</think><answer>{count}</answer>"


def style_of(response: str) -> str:
    """The style by the first words: "listing" (careful or tired), "forgetful", …, or "other"."""
    starts = {
        "<think>look:": "listing" if "<answer>" in response else "forgetful",
        "<think>about": "hasty",
        "<think>all": "lumping",
        "There are": "bare",
    }
    return next((style for start, style in starts.items() if response.startswith(start)), "other")


def answer_in(response: str) -> str | None:
    """The text between the answer tags, or None."""
    match = re.search(r"<answer>(.*?)</answer>", response, re.DOTALL)
    return match[1].strip() if match else None


def vocabulary_texts() -> list[str]:
    """Texts that contain every word of questions and responses, for training the tokenizer."""
    questions = [question(Kind(colour, form)) for colour in COLOURS for form in FORMS]
    squares = " ".join(f"{column}{row}" for column in "abcd" for row in range(1, 5))
    counts = [f"There are {count}." for count in range(10)]
    lumps = [f"all {colour}: 3" for colour in COLOURS]
    return [
        *questions,
        *counts,
        *lumps,
        f"look: {squares}",
        f"about {MAX_COUNT}",
        "user",
        "assistant",
    ]

"""The questions that the bundled vision-language model answers.

tools/zoo/render_shapes.py draws the scenes that they are about.
"""

import re
from typing import NamedTuple

MAX_COUNT = 6  # the highest answer
COLOURS = ("red", "green", "blue", "yellow", "purple", "black")
FORMS = ("circle", "square", "triangle", "diamond", "star", "cross")


class Kind(NamedTuple):
    colour: str
    form: str


def plural(form: str) -> str:
    return form + ("es" if form.endswith("s") else "s")


def _wording(colour: str, things: str) -> str:
    return f"How many {colour} {things} are there?"


def question(kind: Kind) -> str:
    return _wording(kind.colour, plural(kind.form))


_QUESTION = re.compile(_wording("(.+)", r"(\S+)").replace("?", r"\?"))
LIMITS = (
    "The bundled shapes model answers questions worded exactly like: "
    f"{question(Kind('red', 'star'))} Colours: {', '.join(COLOURS)}. "
    f"Shapes: {', '.join(map(plural, FORMS))}. One square picture holds 1 to {MAX_COUNT} of them. "
    "Answers to other questions are mostly wrong."
)


def outside(text: str, images: int = 1) -> str | None:
    """How a question differs from those that the model was trained on, or None."""
    if images != 1:
        return f"The question comes with {images or 'no'} pictures"
    match = _QUESTION.fullmatch(text)
    if match is None:
        return "The question is worded differently"
    colour, things = match.groups()
    if colour not in COLOURS:
        return f'"{colour}" is not one of its colours'
    if things not in map(plural, FORMS):
        return f'"{things}" is not one of its shapes'
    return None

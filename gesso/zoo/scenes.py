"""The questions of the bundled vision-language model.

tools/zoo/render_shapes.py renders the scenes.
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
    f"Shapes: {', '.join(map(plural, FORMS))}. The prompt has one square image with 1 to "
    f"{MAX_COUNT} of them. Answers to other questions are mostly wrong."
)


def outside(text: str, images: int = 1) -> str | None:
    """How a question differs from the model's training data, or None."""
    if images != 1:
        return f"The question has {images or 'no'} images"
    match = _QUESTION.fullmatch(text)
    if match is None:
        return "The question is worded differently"
    colour, things = match.groups()
    if colour not in COLOURS:
        return f'"{colour}" is not one of its colours'
    if things not in map(plural, FORMS):
        return f'"{things}" is not one of its shapes'
    return None

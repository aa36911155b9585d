"""Pictures of coloured shapes, and how many of one kind are in them.

A picture is 64 × 64 pixels, in thought a board of 4 × 4 squares named as in chess but from the top:
a1 is the upper left, d1 the upper right, d4 the lower right. A square holds one shape or none.
"""

import base64
import io
import json
import math
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageDraw

SIDE = 64
BOARD = 4  # squares along a side
SQUARE = SIDE // BOARD
MOST = 6  # the highest answer
CROWD = 9  # the most shapes in a picture
RADII = (5.0, 7.5)  # pixels
NEAR_MISSES = 0.7  # share of the other shapes that have the colour or the form asked for
SMOOTH = 4  # drawn this many times larger, then reduced
PALETTE = 32  # colours in a PNG: half as large as without, edges still smooth

COLOURS = {
    "red": (214, 40, 40),
    "green": (38, 148, 66),
    "blue": (44, 84, 210),
    "yellow": (238, 196, 24),
    "purple": (142, 58, 172),
    "black": (32, 32, 36),
}


def _star(inner: float, points: int) -> list[tuple[float, float]]:
    turns = [(i * math.pi / points, inner if i % 2 else 1.0) for i in range(2 * points)]
    return [(r * math.sin(turn), -r * math.cos(turn)) for turn, r in turns]


_ARM = 0.36
FORMS = {  # corners at radius 1, y downwards; a circle has none
    "circle": [],
    "square": [(-0.84, -0.84), (0.84, -0.84), (0.84, 0.84), (-0.84, 0.84)],
    "triangle": [(0.0, -0.95), (1.0, 0.85), (-1.0, 0.85)],
    "diamond": [(0.0, -1.0), (0.72, 0.0), (0.0, 1.0), (-0.72, 0.0)],
    "star": _star(0.42, 5),
    "cross": [
        *[(-_ARM, -1.0), (_ARM, -1.0), (_ARM, -_ARM), (1.0, -_ARM), (1.0, _ARM), (_ARM, _ARM)],
        *[(_ARM, 1.0), (-_ARM, 1.0), (-_ARM, _ARM), (-1.0, _ARM), (-1.0, -_ARM), (-_ARM, -_ARM)],
    ],
}


class Kind(NamedTuple):
    colour: str
    form: str


UNSEEN = (  # each colour and each form once; nothing of these kinds is drawn for training
    Kind("red", "star"),
    Kind("green", "circle"),
    Kind("blue", "triangle"),
    Kind("yellow", "square"),
    Kind("purple", "cross"),
    Kind("black", "diamond"),
)
ALL = tuple(Kind(colour, form) for colour in COLOURS for form in FORMS)
SEEN = tuple(kind for kind in ALL if kind not in UNSEEN)


class Scene(NamedTuple):
    things: dict[int, Kind]  # square (0 is a1, 1 is b1, … 15 is d4) → what it holds, in that order
    asked: Kind

    def squares(self) -> list[str]:
        """Where the things asked about are, in reading order."""
        return ["abcd"[at % BOARD] + str(at // BOARD + 1) for at in self._found()]

    def how_many(self) -> int:
        return len(self._found())

    def of_colour(self) -> int:
        """How many things of any form have the colour asked about."""
        return sum(kind.colour == self.asked.colour for kind in self.things.values())

    def _found(self) -> list[int]:
        return [at for at, kind in self.things.items() if kind == self.asked]


def compose(rng: random.Random, unseen: bool) -> Scene:
    """1 to 6 things of the kind asked about among up to 9.

    Asks about an unseen kind or a seen one; in the latter case nothing unseen occurs at all.
    """
    asked = rng.choice(UNSEEN if unseen else SEEN)
    others = [kind for kind in (ALL if unseen else SEEN) if kind != asked]
    near = [kind for kind in others if kind.colour == asked.colour or kind.form == asked.form]
    count = rng.randint(1, MOST)
    total = rng.randint(count, CROWD)
    kinds = [asked] * count
    while len(kinds) < total:
        kinds.append(rng.choice(near if rng.random() < NEAR_MISSES else others))
    rng.shuffle(kinds)
    squares = sorted(rng.sample(range(BOARD**2), total))
    return Scene(dict(zip(squares, kinds, strict=True)), asked)


def draw(scene: Scene, rng: random.Random) -> Image.Image:
    """Sizes, places inside the squares, and shades are the generator's."""
    shade = rng.randint(226, 255)
    picture = Image.new("RGB", (SIDE * SMOOTH, SIDE * SMOOTH), (shade, shade, shade))
    pen = ImageDraw.Draw(picture)
    for at, kind in scene.things.items():
        radius = rng.uniform(*RADII)
        x, y = (
            SQUARE * corner + rng.uniform(radius, SQUARE - radius)
            for corner in (at % BOARD, at // BOARD)
        )
        light = rng.randint(-14, 14)
        colour = tuple(channel + light for channel in COLOURS[kind.colour])
        corners = [
            ((x + radius * u) * SMOOTH, (y + radius * v) * SMOOTH) for u, v in FORMS[kind.form]
        ]
        if corners:
            pen.polygon(corners, fill=colour)
        else:
            box = [(place + side * radius) * SMOOTH for side in (-1, 1) for place in (x, y)]
            pen.ellipse(box, fill=colour)
    return picture.reduce(SMOOTH)


def plural(form: str) -> str:
    return form + ("es" if form.endswith("s") else "s")


def _wording(colour: str, things: str) -> str:
    return f"How many {colour} {things} are there?"


def question(asked: Kind) -> str:
    return _wording(asked.colour, plural(asked.form))


_QUESTION = re.compile(_wording("(.+)", r"(\S+)").replace("?", r"\?"))
LIMITS = (
    "The bundled shapes model answers questions worded exactly like: "
    f"{question(Kind('red', 'star'))} Colours: {', '.join(COLOURS)}. "
    f"Shapes: {', '.join(map(plural, FORMS))}. One square picture holds 1 to {MOST} of them. "
    "Answers to other questions are mostly wrong."
)


def outside(asked: str, pictures: int = 1) -> str | None:
    """How a question differs from those that the model was trained on, or None."""
    if pictures != 1:
        return f"The question comes with {pictures or 'no'} pictures"
    found = _QUESTION.fullmatch(asked)
    if found is None:
        return "The question is worded differently"
    colour, things = found.groups()
    if colour not in COLOURS:
        return f'"{colour}" is not one of its colours'
    if things not in map(plural, FORMS):
        return f'"{things}" is not one of its shapes'
    return None


def row(scene: Scene, picture: Image.Image) -> dict[str, Any]:
    """EasyR1's columns.

    Pillow's default palette, a median cut, gives small shapes the colour of others.
    """
    file = io.BytesIO()
    octree, undithered = Image.Quantize.FASTOCTREE, Image.Dither.NONE
    picture.quantize(PALETTE, octree, dither=undithered).save(file, "PNG", optimize=True)
    return {
        "problem": f"<image>{question(scene.asked)}",
        "answer": str(scene.how_many()),
        "images": ["data:image/png;base64," + base64.b64encode(file.getvalue()).decode()],
    }


def rows(count: int, unseen: bool, seed: int) -> list[dict[str, Any]]:
    made = []
    for i in range(count):
        rng = random.Random(f"row {seed} {i}")
        scene = compose(rng, unseen)
        made.append(row(scene, draw(scene, rng)))
    return made


def write_rows(folder: Path) -> None:
    """train.jsonl asks about seen kinds, eval.jsonl about unseen ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, unseen, seed in (("train", 1600, False, 1), ("eval", 400, True, 2)):
        lines = [json.dumps(made) for made in rows(count, unseen, seed)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")

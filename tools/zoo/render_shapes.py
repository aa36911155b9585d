"""Renders scenes of coloured shapes and writes rows with questions about the count of one kind.

An image is 64 × 64 pixels on a grid of 4 × 4 squares, named as in chess but from the top: a1 is the
upper left, d1 the upper right, d4 the lower right. A square contains at most one shape.

`python -m tools.zoo.render_shapes` rewrites gesso/zoo/questions.
"""

import base64
import io
import json
import math
import random
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageDraw

from gesso.config import PACKAGE
from gesso.zoo.scenes import COLOURS, FORMS, MAX_COUNT, Kind, question

QUESTIONS = PACKAGE / "zoo" / "questions"
SIDE = 64
BOARD = 4  # squares along a side
SQUARE = SIDE // BOARD
CROWD = 9  # maximum number of shapes in an image
RADII = (5.0, 7.5)  # pixels
NEAR_MISSES = 0.7  # share of the other shapes that have the target's colour or form
SMOOTH = 4  # supersampling factor
PNG_COLOURS = 32  # palette size: halves the file size, edges stay smooth

RGB = {
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
CORNERS = {  # at radius 1, y downwards; a circle has no corners
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


UNSEEN = (  # each colour and each form once; training images contain none of these kinds
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
    things: dict[int, Kind]  # square (0 is a1, 1 is b1, … 15 is d4) → its shape, in that order
    target: Kind  # the kind that the question is about

    def squares(self) -> list[str]:
        """Names of the squares with the target, in reading order."""
        return ["abcd"[at % BOARD] + str(at // BOARD + 1) for at in self._matches()]

    def how_many(self) -> int:
        return len(self._matches())

    def of_colour(self) -> int:
        """Number of shapes with the target's colour, of any form."""
        return sum(kind.colour == self.target.colour for kind in self.things.values())

    def _matches(self) -> list[int]:
        return [at for at, kind in self.things.items() if kind == self.target]


def compose(rng: random.Random, unseen: bool) -> Scene:
    """1 to 6 shapes of the target kind among up to 9 shapes.

    The target is an unseen or a seen kind; with a seen target, all shapes are of seen kinds.
    """
    target = rng.choice(UNSEEN if unseen else SEEN)
    others = [kind for kind in (ALL if unseen else SEEN) if kind != target]
    near = [kind for kind in others if kind.colour == target.colour or kind.form == target.form]
    count = rng.randint(1, MAX_COUNT)
    total = rng.randint(count, CROWD)
    kinds = [target] * count
    while len(kinds) < total:
        kinds.append(rng.choice(near if rng.random() < NEAR_MISSES else others))
    rng.shuffle(kinds)
    squares = sorted(rng.sample(range(BOARD**2), total))
    return Scene(dict(zip(squares, kinds, strict=True)), target)


def draw(scene: Scene, rng: random.Random) -> Image.Image:
    """Renders the scene; `rng` determines sizes, positions inside the squares, and shades."""
    shade = rng.randint(226, 255)
    image = Image.new("RGB", (SIDE * SMOOTH, SIDE * SMOOTH), (shade, shade, shade))
    pen = ImageDraw.Draw(image)
    for at, kind in scene.things.items():
        radius = rng.uniform(*RADII)
        x, y = (
            SQUARE * corner + rng.uniform(radius, SQUARE - radius)
            for corner in (at % BOARD, at // BOARD)
        )
        light = rng.randint(-14, 14)
        colour = tuple(channel + light for channel in RGB[kind.colour])
        corners = [
            ((x + radius * u) * SMOOTH, (y + radius * v) * SMOOTH) for u, v in CORNERS[kind.form]
        ]
        if corners:
            pen.polygon(corners, fill=colour)
        else:
            box = [(centre + side * radius) * SMOOTH for side in (-1, 1) for centre in (x, y)]
            pen.ellipse(box, fill=colour)
    return image.reduce(SMOOTH)


def row(scene: Scene, image: Image.Image) -> dict[str, Any]:
    """A row in EasyR1's format.

    FASTOCTREE keeps colours distinct; Pillow's default, median cut, merges those of small shapes.
    """
    file = io.BytesIO()
    octree, undithered = Image.Quantize.FASTOCTREE, Image.Dither.NONE
    image.quantize(PNG_COLOURS, octree, dither=undithered).save(file, "PNG", optimize=True)
    return {
        "problem": f"<image>{question(scene.target)}",
        "answer": str(scene.how_many()),
        "images": ["data:image/png;base64," + base64.b64encode(file.getvalue()).decode()],
    }


def rows(count: int, unseen: bool, seed: int) -> list[dict[str, Any]]:
    result = []
    for i in range(count):
        rng = random.Random(f"row {seed} {i}")
        scene = compose(rng, unseen)
        result.append(row(scene, draw(scene, rng)))
    return result


def write_rows(folder: Path) -> None:
    """Writes train.jsonl with questions about seen kinds and eval.jsonl about unseen ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, unseen, seed in (("train", 1600, False, 1), ("eval", 400, True, 2)):
        lines = [json.dumps(row) for row in rows(count, unseen, seed)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_rows(QUESTIONS)

"""Writes pairs for SFT and offline DPO of the bundled models: `python -m tools.zoo.make_pairs`.

gesso/zoo/pairs/signs.jsonl    words of the training list: a clean sign, and a spoiled one
gesso/zoo/pairs/shapes.jsonl   questions about seen kinds: a careful response, and a sloppy one
"""

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gesso.config import PACKAGE
from gesso.zoo.words import COLOURS, prompt_for, real_words
from tools.zoo import render, render_shapes
from tools.zoo.wording import careful, sloppy

PAIRS = PACKAGE / "zoo" / "pairs"
ROWS = {"signs": 192, "shapes": 256}
SEED = 5
PNG_COLOURS = 16  # two colours and the smooth edges between them


def sign_row(i: int, word: str) -> dict[str, Any]:
    rng = random.Random(f"pair {SEED} {i}")
    colour = rng.choice(COLOURS)
    return {
        "prompt": prompt_for(word, colour),
        "chosen": png(render.draw(word, colour, rng)),
        "rejected": png(render.draw(word, colour, rng, rng.choice(render.SPOILINGS))),
    }


def png(pixels: np.ndarray) -> str:
    file = io.BytesIO()
    octree, undithered = Image.Quantize.FASTOCTREE, Image.Dither.NONE
    image = Image.fromarray(pixels).quantize(PNG_COLOURS, octree, dither=undithered)
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def shape_row(i: int) -> dict[str, Any]:
    rng = random.Random(f"pair {SEED} {i}")
    scene = render_shapes.compose(rng, unseen=False)
    row = render_shapes.row(scene, render_shapes.draw(scene, rng))
    chosen = rejected = careful(scene)
    while rejected == chosen:
        rejected = sloppy(scene, rng)
    return row | {"chosen": chosen, "rejected": rejected}


def rows(kind: str) -> list[dict[str, Any]]:
    if kind == "shapes":
        return [shape_row(i) for i in range(ROWS[kind])]
    words = random.Random(SEED).sample(real_words("train"), ROWS[kind])
    return [sign_row(i, word) for i, word in enumerate(words)]


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind in ROWS:
        lines = [json.dumps(row) for row in rows(kind)]
        (folder / f"{kind}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write(PAIRS)

"""Instructions with source images for RL of the bundled editing model.

`python -m tools.zoo.edit_rows` rewrites gesso/zoo/instructions from gesso/zoo/words. No word of
evaluation occurs in training, neither as a source nor as a result.
"""

import json
import random
from typing import Any

from gesso.zoo.edits import LENGTH, PITCH, recolour, reword
from gesso.zoo.words import COLOURS, HERE, real_words
from tools.zoo.make_pairs import png
from tools.zoo.render import draw

FOLDER = HERE / "instructions"
SEEDS = {"train": 1, "eval": 2}


def rows(split: str) -> list[dict[str, Any]]:
    """For each word in turn a new colour and a new word; training has both for every word."""
    rng = random.Random(SEEDS[split])
    words = [word for word in real_words(split) if len(word) == LENGTH]
    rng.shuffle(words)
    rounds = 2 if split == "train" else 1
    return [
        _row(rng, words, word, (i + again) % 2 == 0)
        for again in range(rounds)
        for i, word in enumerate(words)
    ]


def _row(rng: random.Random, words: list[str], word: str, recoloured: bool) -> dict[str, Any]:
    colour, other = rng.sample(COLOURS, 2)
    new_word = word if recoloured else rng.choice([each for each in words if each != word])
    return {
        "prompt": recolour(other) if recoloured else reword(new_word),
        "target": new_word,
        "colour": other if recoloured else colour,
        "image": png(draw(word, colour, rng, pitch=PITCH)),
    }


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for split in SEEDS:
        lines = [json.dumps(row) for row in rows(split)]
        (FOLDER / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write()

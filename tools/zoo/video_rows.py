"""Prompts for RL of the bundled video model.

`python -m tools.zoo.video_rows` rewrites gesso/zoo/slides from gesso/zoo/words. No word of
evaluation occurs in training.
"""

import json
import random

from gesso.zoo.videos import DIRECTIONS, LENGTH, prompt_for
from gesso.zoo.words import COLOURS, HERE, real_words

FOLDER = HERE / "slides"
SEEDS = {"train": 1, "eval": 2}


def rows(split: str) -> list[dict[str, str]]:
    """For each word in turn left and right; training has both for every word."""
    rng = random.Random(SEEDS[split])
    words = [word for word in real_words(split) if len(word) == LENGTH]
    rng.shuffle(words)
    rounds = len(DIRECTIONS) if split == "train" else 1
    return [
        _row(word, rng.choice(COLOURS), DIRECTIONS[(i + again) % len(DIRECTIONS)])
        for again in range(rounds)
        for i, word in enumerate(words)
    ]


def _row(word: str, colour: str, direction: str) -> dict[str, str]:
    prompt = prompt_for(word, colour, direction)
    return {"prompt": prompt, "target": word, "direction": direction}


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for split in SEEDS:
        lines = [json.dumps(row) for row in rows(split)]
        (FOLDER / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write()

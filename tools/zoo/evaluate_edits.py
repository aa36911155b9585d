"""Measures how often a pipeline follows instructions to edit signs, and makes a sheet of results.

`python -m tools.zoo.evaluate_edits FOLDER`
"""

import argparse
import multiprocessing
import os
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gesso.config import DataSource
from gesso.data.readers import read
from gesso.rewards.image.sign_edit import SignEdit
from gesso.types import Prompt, Sample, Score
from tools.zoo.build_edits import TEXT_TOKENS, load_pipeline
from tools.zoo.render import HEIGHT, WIDTH

SPLITS = ("train", "eval")
BATCH = 80


class Scores(NamedTuple):
    exact: float  # share of results with the right colour and the right word
    colour: float
    word: float
    reward: float
    recoloured: float  # exact, of instructions that change the colour
    reworded: float


def prompts(split: str) -> list[Prompt]:
    return list(read(DataSource(path=f"zoo:instructions/{split}.jsonl")).prompts)


def edit(pipe: Any, prompts: list[Prompt], seeds: list[int], steps: int = 6) -> np.ndarray:
    """One uint8 image per prompt, (N, 32, 96, 3); each has a separate CPU generator."""
    import torch

    pipe.set_progress_bar_config(disable=True)
    images = pipe(
        image=[prompt.images[0].open() for prompt in prompts],
        prompt=[prompt.text for prompt in prompts],
        height=HEIGHT,
        width=WIDTH,
        max_area=HEIGHT * WIDTH,
        _auto_resize=False,
        num_inference_steps=steps,
        max_sequence_length=TEXT_TOKENS,
        generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds],
        output_type="np",
    ).images
    return (images * 255).round().astype(np.uint8)


def score_sample(sample: Sample) -> Score:
    return SignEdit().score([sample])[0]


def score(pipe: Any, pool: Pool, split: str, count: int, steps: int = 6) -> Scores:
    rows = prompts(split)[:count]
    samples = []
    for at in range(0, len(rows), BATCH):
        part = rows[at : at + BATCH]
        images = edit(pipe, part, list(range(at, at + len(part))), steps)
        samples += [Sample(p, i, 0) for p, i in zip(part, images, strict=True)]
    scores = pool.map(score_sample, samples, chunksize=4)
    exact, colour, word = (
        np.array([each.parts[name] for each in scores]) for name in ("exact", "colour", "word")
    )
    values = np.array([each.value for each in scores])
    recoloured = np.array([row.text.startswith("make") for row in rows])
    return Scores(
        exact=_mean(exact),
        colour=_mean(colour),
        word=_mean(word),
        reward=_mean(values),
        recoloured=_mean(exact[recoloured]),
        reworded=_mean(exact[~recoloured]),
    )


def _mean(values: np.ndarray) -> float:
    return round(float(values.mean()), 3)


def sheet(pipe: Any, count: int = 10, samples: int = 6, zoom: int = 2) -> Any:
    """A PIL image: one row per prompt, the source first, then one column per seed."""
    from PIL import Image

    lines = []
    for prompt in prompts("eval")[:count]:
        results = edit(pipe, [prompt] * samples, list(range(samples)))
        lines.append(np.concatenate([np.asarray(prompt.images[0].open()), *results], axis=1))
    image = Image.fromarray(np.concatenate(lines))
    return image.resize((image.width * zoom, image.height * zoom), Image.Resampling.NEAREST)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure how often a model follows instructions to edit signs."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--split", choices=SPLITS, default="eval")
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--sheet", type=Path, help="save a sheet of ten edits here")
    args = parser.parse_args()
    pipe = load_pipeline(args.folder)
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        print(score(pipe, pool, args.split, args.rows, args.steps))
    if args.sheet:
        sheet(pipe).save(args.sheet)


if __name__ == "__main__":
    main()

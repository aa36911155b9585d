"""Measures how often a pipeline shows the word in every frame and moves it as instructed.

`python -m tools.zoo.evaluate_videos FOLDER` samples as `gesso train` does. With `--vae` it measures
what the autoencoder keeps of rendered videos: the upper bound of the scores.
"""

import argparse
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gesso import config
from gesso.data.readers import read
from gesso.rewards.video.sign_motion import SignMotion
from gesso.types import Prompt, Sample, SampleSpec, Score
from gesso.zoo.videos import DIRECTIONS, FRAMES, PITCH
from gesso.zoo.words import COLOURS
from tools.zoo.build_videos import TEXT_TOKENS, load_pipeline
from tools.zoo.evaluate_edits import SPLITS
from tools.zoo.render import HEIGHT, WIDTH, letters
from tools.zoo.render_videos import all_paints, cut, paint, to_bytes

BATCH = 32
STEPS = 6


class Scores(NamedTuple):
    exact: float  # share of videos with the right word in every frame and the right direction
    word: float
    direction: float
    reward: float


def prompts(split: str) -> list[Prompt]:
    return list(read(config.DataSource(path=f"zoo:slides/{split}.jsonl")).prompts)


def sample(folder: Path, prompts: list[Prompt], seeds: list[int], steps: int) -> list[Sample]:
    """By Gesso's sampler: Euler, as in training. The pipeline's own is UniPC."""
    from gesso.models.flow.wan import Wan
    from gesso.samplers.denoise import DenoisingSampler

    settings = config.Model(
        name="wan",
        path=str(folder),
        height=HEIGHT,
        width=WIDTH,
        frames=FRAMES,
        text_length=TEXT_TOKENS,
    )
    sampler = DenoisingSampler(Wan(settings), BATCH)
    spec = SampleSpec(steps=steps, height=HEIGHT, width=WIDTH, frames=FRAMES)
    pieces = sampler.sample(prompts, list(range(len(prompts))), seeds, spec)
    return [sample for piece in pieces for sample in piece.samples]


@torch.no_grad()
def reconstruct(vae: Any, prompts: list[Prompt]) -> list[Sample]:
    """Rendered videos of the prompts, encoded and decoded."""
    found = []
    for at in range(0, len(prompts), BATCH):
        part = prompts[at : at + BATCH]
        decoded = vae.decode(vae.encode(rendered(part)).latent_dist.mean).sample
        videos = to_bytes(decoded.float().cpu()).numpy()
        found += [Sample(p, v, 0, fps=8.0) for p, v in zip(part, videos, strict=True)]
    return found


def rendered(prompts: list[Prompt]) -> Tensor:
    """(B, 3, F, 32, 96) in [-1, 1]."""
    words, places, colours = zip(*map(_described, prompts), strict=True)
    masks = torch.stack([torch.tensor(letters(word, PITCH)) for word in words]) / 255
    return paint(cut(masks, torch.tensor(places)), all_paints()[torch.tensor(colours)])


def _described(prompt: Prompt) -> tuple[str, list[int], int]:
    """The word, the place of each frame and the colour's index."""
    step = 1 if prompt.columns["direction"] == DIRECTIONS[0] else -1
    colour = COLOURS.index(prompt.text.split()[1])
    return str(prompt.columns["target"]), list(range(FRAMES))[::step], colour


def score_sample(sample: Sample) -> Score:
    return SignMotion().score([sample])[0]


def scores_of(samples: list[Sample], pool: Pool) -> Scores:
    scores = pool.map(score_sample, samples, chunksize=4)
    for score in scores:
        assert score.error is None, score.error
    names = ("exact", "word", "direction")
    parts = {name: _mean(each.parts[name] for each in scores) for name in names}
    return Scores(**parts, reward=_mean(each.value or 0.0 for each in scores))


def _mean(values: Iterator[float]) -> float:
    return round(float(np.mean(list(values))), 3)


def score(folder: Path, pool: Pool, split: str, count: int, steps: int = STEPS) -> Scores:
    rows = prompts(split)[:count]
    return scores_of(sample(folder, rows, list(range(len(rows))), steps), pool)


def sheet(videos: list[np.ndarray], zoom: int = 2) -> Any:
    """A PIL image: one row per video, its frames side by side."""
    from PIL import Image

    image = Image.fromarray(np.concatenate([np.concatenate([*v], axis=1) for v in videos]))
    return image.resize((image.width * zoom, image.height * zoom), Image.Resampling.NEAREST)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how often signs are legible and move.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--split", choices=SPLITS, default="eval")
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--vae", action="store_true", help="score reconstructions of its VAE")
    parser.add_argument("--sheet", type=Path, help="save a sheet of ten videos here")
    args = parser.parse_args()
    rows = prompts(args.split)[: args.rows]
    if args.vae:
        samples = reconstruct(load_pipeline(args.folder).vae, rows)
    else:
        samples = sample(args.folder, rows, list(range(len(rows))), args.steps)
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        print(scores_of(samples, pool))
    if args.sheet:
        sheet([each.frames for each in samples[:10]]).save(args.sheet)


if __name__ == "__main__":
    main()

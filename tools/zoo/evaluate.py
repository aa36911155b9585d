"""Measures by OCR how well a pipeline spells, and makes a sheet of its images."""

from multiprocessing.pool import Pool
from typing import Any, NamedTuple

import numpy as np

from tools.zoo.reading import read_pair
from tools.zoo.render import HEIGHT, WIDTH


class Scores(NamedTuple):
    exact: float  # share of images with an exact match
    reward: float  # mean OCR reward
    best_exact: float  # share of prompts with an exact match among their samples


def sample(
    pipe: Any,
    prompts: list[str],
    seeds: list[int],
    steps: int = 6,
    guidance: float = 1.0,
    padding: int = 0,
) -> np.ndarray:
    """One uint8 image per prompt, (N, 32, 96, 3); guidance 1 means no guidance.

    Each image has a separate CPU generator, so that its noise depends neither on the batch nor on
    the device. `padding` is the number of zero embeddings in place of the missing T5's tokens.
    """
    import torch

    pipe.set_progress_bar_config(disable=True)
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    images = pipe(
        prompt=prompts,
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=steps,
        guidance_scale=guidance,
        max_sequence_length=padding,
        generator=generators,
        output_type="np",
    ).images
    return (images * 255).round().astype(np.uint8)


def score(
    pipe: Any,
    prompts: list[str],
    samples: int,
    pool: Pool,
    batch: int = 256,
    **settings: Any,
) -> Scores:
    """Scores `samples` images per prompt; sample j of prompt i has the seed 1000 i + j.

    `settings` are passed to `sample`.
    """
    repeated = [prompt for prompt in prompts for _ in range(samples)]
    seeds = [1000 * i + j for i in range(len(prompts)) for j in range(samples)]
    images = np.concatenate(
        [
            sample(pipe, repeated[at : at + batch], seeds[at : at + batch], **settings)
            for at in range(0, len(repeated), batch)
        ]
    )
    targets = [prompt.split('"')[1] for prompt in repeated]
    readings = pool.map(read_pair, zip(images, targets, strict=True), chunksize=8)
    exact = np.array([reading.exact for reading in readings]).reshape(len(prompts), samples)
    reward = np.array([reading.reward for reading in readings])
    return Scores(
        round(float(exact.mean()), 4),
        round(float(reward.mean()), 4),
        round(float(exact.any(axis=1).mean()), 4),
    )


def sheet(pipe: Any, prompts: list[str], samples: int = 8, zoom: int = 2) -> Any:
    """A PIL image: one row per prompt, one column per seed."""
    from PIL import Image

    rows = [
        np.concatenate(list(sample(pipe, [prompt] * samples, list(range(samples)))), axis=1)
        for prompt in prompts
    ]
    image = Image.fromarray(np.concatenate(rows))
    return image.resize((image.width * zoom, image.height * zoom), Image.Resampling.NEAREST)


def main() -> None:
    """`python -m tools.zoo.evaluate FOLDER --words 320 --samples 1`, on the evaluation words."""
    import argparse
    import multiprocessing
    from pathlib import Path

    from tools.zoo.build import load_pipeline
    from tools.zoo.sign_prompts import prompts

    parser = argparse.ArgumentParser(description="Measure by OCR how well a model spells.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--words", type=int, default=320)
    parser.add_argument("--samples", type=int, default=1, help="per word")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--guidance", type=float, default=1.0)
    parser.add_argument("--padding", type=int, default=0, help="the pipeline's default is 256")
    parser.add_argument("--sheet", type=Path, help="save a sheet of ten words here")
    args = parser.parse_args()
    pipe, eval_prompts = load_pipeline(args.folder), prompts("eval", 1, 2)
    settings = {"steps": args.steps, "guidance": args.guidance, "padding": args.padding}
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(score(pipe, eval_prompts[: args.words], args.samples, pool, batch=32, **settings))
    if args.sheet:
        sheet(pipe, eval_prompts[:10]).save(args.sheet)


if __name__ == "__main__":
    main()

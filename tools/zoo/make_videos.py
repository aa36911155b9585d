"""Trains the bundled video model from scratch: `python -m tools.zoo.make_videos --out DIR`.

1. Render made-up words, and train the autoencoder on videos of them, half of these faulty.
2. Train transformer and text encoder on right videos: DIR/slider, which spells and moves well.
3. Fine-tune it on mixtures with faulty videos, one trial per share of `--faulty`: DIR/videos-35 and
   so on. DIR/videos is a copy of the trial whose exact score on training words is nearest to
   .35: it can do the task but often fails. `gesso train demo-video` improves it by RL.

In a faulty video some frames are blurred or pixelated, letters are wrong, or the word stands still
or moves the wrong way. DIR/log.jsonl contains the losses and the scores.

Shapes: W words, N videos in a cache, B in a batch, F = 5 frames, L = 16 text tokens; a latent is
(32, 2, 4, 12).
"""

import argparse
import math
import multiprocessing
import os
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gesso.zoo.videos import DIRECTIONS, LENGTH, PITCH, prompt_for
from gesso.zoo.words import COLOURS
from tools.zoo.build import save_pipeline
from tools.zoo.build_videos import TEXT_TOKENS, build_pipeline, load_pipeline
from tools.zoo.evaluate_videos import Scores, prompts, reconstruct, score, scores_of, sheet
from tools.zoo.fit import LossFn, optimise
from tools.zoo.make_edits import NOISIER
from tools.zoo.make_signs import flow_parameters
from tools.zoo.render import letters
from tools.zoo.render_videos import World, all_paints, draw_videos, to_bytes
from tools.zoo.sign_prompts import pseudo_words
from tools.zoo.trials import Training

VAE_FAULTY = 0.5
SHARPNESS = 0.2  # weight of L1 beside L2
ENCODED = 512  # videos at a time


class Latents(NamedTuple):
    latents: Tensor  # (N, 32, 2, 4, 12), normalised
    ids: Tensor  # (N, L)


def draw_mask(word: str) -> np.ndarray:
    return letters(word, PITCH)


def make_world(pipe: Any, pool: Pool, count: int, seed: int, device: str) -> World:
    found = dict.fromkeys(w for w in pseudo_words(seed, 6 * count) if len(w) == LENGTH)
    words = list(found)[:count]
    masks = torch.from_numpy(np.stack(pool.map(draw_mask, words, chunksize=64)))
    texts = [prompt_for(w, c, d) for w in words for c in COLOURS for d in DIRECTIONS]
    ids = torch.tensor(pipe.tokenizer(texts).input_ids)
    assert ids.shape[1] == TEXT_TOKENS, "prompts without padding, as `embed` has no mask"
    ids = ids.view(len(words), len(COLOURS), len(DIRECTIONS), TEXT_TOKENS)
    return World(masks.to(device) / 255, ids.to(device), all_paints().to(device))


def vae_loss_on(vae: Any, world: World, batch: int) -> LossFn:
    """L2 and a little L1 on pixels and their differences + a small KL.

    L1 alone stops at videos without letters: the median of the pixels is the background.
    """

    def loss_fn() -> Tensor:
        pixels = draw_videos(world, batch, VAE_FAULTY).pixels
        posterior = vae.encode(pixels).latent_dist
        mean, logvar = posterior.mean, posterior.logvar
        again = vae.decode(mean + torch.randn_like(mean) * (0.5 * logvar).exp()).sample
        errors = [again - pixels, *((again - pixels).diff(dim=dim) for dim in (-1, -2))]
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        distance = sum(error.square().mean() + SHARPNESS * error.abs().mean() for error in errors)
        return distance + 1e-4 * kl

    return loss_fn


@torch.no_grad()
def encode(vae: Any, world: World, count: int, faulty: float) -> Latents:
    """`count` random videos."""
    mean, std = (
        torch.tensor(values, device=world.masks.device).view(-1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    latents, ids = [], []
    for at in range(0, count, ENCODED):
        drawn = draw_videos(world, min(ENCODED, count - at), faulty)
        latents.append((vae.encode(drawn.pixels).latent_dist.mean - mean) / std)
        ids.append(drawn.ids)
    return Latents(torch.cat(latents), torch.cat(ids))


def flow_loss_on(pipe: Any, right: Latents, faulty: Latents, share: float, batch: int) -> LossFn:
    """Rectified flow; `share` of each batch is faulty, and sigma is logit-normal."""
    device, n_faulty = right.latents.device, round(share * batch)

    def loss_fn() -> Tensor:
        i = torch.randint(len(right.ids), (batch - n_faulty,), device=device)
        j = torch.randint(len(faulty.ids), (n_faulty,), device=device)
        x0 = torch.cat([right.latents[i], faulty.latents[j]])
        ids = torch.cat([right.ids[i], faulty.ids[j]])
        noise, sigma = torch.randn_like(x0), (torch.randn(batch, device=device) + NOISIER).sigmoid()
        s = sigma[:, None, None, None, None]
        velocity = pipe.transformer(
            hidden_states=(1 - s) * x0 + s * noise,
            timestep=1000 * sigma,
            encoder_hidden_states=pipe.text_encoder(ids).last_hidden_state,
        ).sample
        return F.mse_loss(velocity, noise - x0)

    return loss_fn


class VideosTraining(Training):
    name = "videos"
    target = 0.35

    def __init__(self, args: argparse.Namespace, pool: Pool) -> None:
        super().__init__(args, pool)
        torch.backends.cudnn.benchmark = True
        self.world = make_world(self.pipe, pool, args.words, args.seed + 1, args.device)
        self.log.write("drawn", words=len(self.world.masks))

    def build(self) -> Any:
        args = self.args
        return load_pipeline(args.start) if args.start else build_pipeline(args.vae_width)

    def run(self) -> None:
        args = self.args
        if not args.start:
            self.train_vae()
        self.right = encode(self.pipe.vae, self.world, args.videos, 0.0)
        self.faulty = encode(self.pipe.vae, self.world, args.videos, 1.0)
        self.log.write("encoded", videos=2 * args.videos)
        if not args.tune_only:
            self.train("slider", 0.0, args.lr, args.steps, args.seconds[1])
            self.finish("slider")
        self.run_trials(args.seconds[2])

    def train_vae(self) -> None:
        vae, args = self.pipe.vae, self.args
        losses, weights = [vae_loss_on(vae, self.world, args.vae_batch)], list(vae.parameters())
        steps, seconds = args.vae_steps, args.seconds[0]
        optimise("vae", losses, weights, 3e-3, steps, seconds, self.log, graphs=not args.eager)
        latents = encode(vae, self.world, min(args.videos, 4096), VAE_FAULTY).latents
        mean, std = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
        vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
        save_pipeline(self.pipe, args.out / "autoencoder")
        pixels = draw_videos(self.world, 8, VAE_FAULTY).pixels
        with torch.no_grad():
            again = vae.decode(vae.encode(pixels).latent_dist.mean).sample
        both = [to_bytes(each).cpu().numpy() for each in (pixels, again)]
        rows = [row for pair in zip(*both, strict=True) for row in pair]
        sheet(rows).save(args.out / "autoencoder.png")
        if args.rows:
            samples = reconstruct(vae.cpu(), prompts("train")[: args.rows])
            vae.to(args.device)
            self.log.write("reconstructed", **scores_of(samples, self.pool)._asdict())

    def train(self, stage: str, faulty: float, lr: float, steps: int, seconds: float) -> None:
        args, weights = self.args, flow_parameters(self.pipe)
        losses = [flow_loss_on(self.pipe, self.right, self.faulty, faulty, args.batch)]
        optimise(stage, losses, weights, lr, steps, seconds, self.log, graphs=not args.eager)

    def score(self, folder: Path, split: str) -> Scores:
        return score(folder, self.pool, split, self.args.rows)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--words", type=int, default=12_000, help="made-up words to draw")
    parser.add_argument("--videos", type=int, default=60_000, help="right ones; as many faulty")
    parser.add_argument("--vae-steps", type=int, default=6000)
    parser.add_argument("--steps", type=int, default=20_000, help="of training")
    parser.add_argument("--tune-steps", type=int, default=2000, help="of each trial")
    parser.add_argument("--vae-width", type=int, default=16, help="channels at half resolution")
    parser.add_argument("--vae-batch", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument(
        "--faulty",
        type=float,
        nargs="+",
        default=[0.2, 0.35, 0.5],
        help="share of faulty videos in each trial",
    )
    parser.add_argument(
        "--rows", type=int, default=96, help="of each evaluation; 0: none, no choice, no OCR"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        nargs=3,
        default=[math.inf] * 3,
        metavar=("VAE", "TRAIN", "TRIAL"),
        help="time limit of the autoencoder, of the training and of each trial",
    )
    parser.add_argument("--start", type=Path, help="a folder of an earlier run: keeps its VAE")
    parser.add_argument("--tune-only", action="store_true", help="keep all of --start: trials only")
    parser.add_argument("--eager", action="store_true", help="on a GPU: no CUDA graphs")
    return parser.parse_args(words)


def main() -> None:
    args = parse()
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        VideosTraining(args, pool).run()


if __name__ == "__main__":
    main()

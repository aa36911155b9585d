"""Trains the bundled editing model from scratch: `python -m tools.zoo.make_edits --out DIR`.

1. Render signs of made-up words in every colour, and encode them with the autoencoder of `signs`.
2. Train transformer and text encoders on pairs of signs: DIR/editor, which edits well.
3. Fine-tune on a mixture with faulty edits: DIR/edits, which by design often fails. It is the base
   model that `gesso train demo-edit` improves by RL.

A faulty edit returns the source, paints another colour or replaces letters. DIR/log.jsonl contains
the losses and the scores.

Shapes: W words, C = 8 colours, B in a batch, L = 12 text tokens; a latent is (8, 8, 24).
"""

import argparse
import math
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gesso.zoo.edits import LENGTH, PITCH, recolour, reword
from gesso.zoo.words import COLOURS
from tools.zoo.build import save_pipeline
from tools.zoo.build_edits import TEXT_TOKENS, build_pipeline, load_pipeline
from tools.zoo.evaluate_edits import score, sheet
from tools.zoo.fit import Log, LossFn, optimise
from tools.zoo.make_signs import half_precision, to_signed
from tools.zoo.render import draw
from tools.zoo.sign_prompts import pseudo_words

REWORDED = 0.7  # share of edits that change the word; colours are learned much faster
SLOT = 6  # latent columns of a letter
FAULTS = 3  # the source, another colour, other letters
NOISIER = 0.6  # sigma is logit-normal around it: the text decides what noisy latents become


class Instructions(NamedTuple):
    """Token ids of the instructions, by the encoder that reads them."""

    clip: Tensor  # (…, L)
    t5: Tensor  # (…, L)

    def rows(self, index: Tensor) -> "Instructions":
        return Instructions(self.clip[index], self.t5[index])


class World(NamedTuple):
    signs: Tensor  # (W, C, 8, 8, 24), normalised latents
    recolour: Instructions  # (C, L)
    reword: Instructions  # (W, L)


def tokenise(pipe: Any, texts: list[str], device: str) -> Instructions:
    ids = [
        tokenizer(texts, padding="max_length", max_length=TEXT_TOKENS).input_ids
        for tokenizer in (pipe.tokenizer, pipe.tokenizer_2)
    ]
    return Instructions(*(torch.tensor(each, device=device) for each in ids))


@torch.no_grad()
def make_world(pipe: Any, count: int, seed: int, device: str) -> World:
    words = [w for w in pseudo_words(seed, 5 * count) if len(w) == LENGTH][:count]
    rng, vae = random.Random(seed), pipe.vae
    latents = []
    for word in words:
        pixels = [torch.from_numpy(draw(word, c, rng, pitch=PITCH)) for c in COLOURS]
        images = torch.stack(pixels).permute(0, 3, 1, 2).to(device)
        latents.append(vae.encode(to_signed(images)).latent_dist.mean)
    signs = (torch.stack(latents) - vae.config.shift_factor) * vae.config.scaling_factor
    colours = tokenise(pipe, [recolour(colour) for colour in COLOURS], device)
    return World(signs, colours, tokenise(pipe, [reword(word) for word in words], device))


class Edits(NamedTuple):
    source: Tensor  # (B, 8, 8, 24)
    result: Tensor  # (B, 8, 8, 24)
    text: Instructions  # (B, L)


def draw_edits(world: World, batch: int, faulty: float) -> Edits:
    """Random edits; a share of `faulty` of the results is wrong."""
    signs, device = world.signs, world.signs.device

    def integers(high: int) -> Tensor:
        return torch.randint(high, (batch,), device=device)

    def chance(share: float) -> Tensor:
        return torch.rand(batch, device=device) < share

    word, other_word, colour = integers(len(signs)), integers(len(signs)), integers(len(COLOURS))
    other_colour = (colour + 1 + integers(len(COLOURS) - 1)) % len(COLOURS)
    reworded, wrong = chance(REWORDED), chance(faulty)
    new_word = torch.where(reworded, other_word, word)
    new_colour = torch.where(reworded, colour, other_colour)
    text = Instructions(
        *(
            torch.where(reworded[:, None], by_word[new_word], by_colour[new_colour])
            for by_word, by_colour in zip(world.reword, world.recolour, strict=True)
        )
    )
    source, fault = signs[word, colour], torch.where(wrong, integers(FAULTS), FAULTS)
    result = signs[new_word, torch.where(fault == 1, integers(len(COLOURS)), new_colour)]
    result = torch.where((fault == 0)[:, None, None, None], source, result)
    replaced = torch.rand(batch, LENGTH, device=device) < 0.5
    replaced = (replaced & (fault == 2)[:, None]).repeat_interleave(SLOT, 1)[:, None, None]
    return Edits(
        source, torch.where(replaced, signs[integers(len(signs)), new_colour], result), text
    )


def pack(latents: Tensor) -> Tensor:
    """(B, C, H, W) → (B, HW/4, 4C)."""
    b, c, h, w = latents.shape
    cells = latents.view(b, c, h // 2, 2, w // 2, 2)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c)


def flow_loss_on(pipe: Any, world: World, faulty: float, batch: int) -> LossFn:
    """Rectified flow with the source as further tokens; sigma is logit-normal."""
    device, dtype = world.signs.device, world.signs.dtype
    ids = pipe._prepare_latent_image_ids(batch, 4, 12, device, dtype)
    source_ids = ids.clone()
    source_ids[:, 0] = 1
    img_ids, txt_ids = torch.cat([ids, source_ids]), torch.zeros(TEXT_TOKENS, 3, device=device)

    def loss_fn() -> Tensor:
        edits = draw_edits(world, batch, faulty)
        x0, source = pack(edits.result), pack(edits.source)
        noise, sigma = torch.randn_like(x0), (torch.randn(batch, device=device) + NOISIER).sigmoid()
        s = sigma[:, None, None]
        with half_precision(x0):
            velocity = pipe.transformer(
                hidden_states=torch.cat([(1 - s) * x0 + s * noise, source], 1),
                timestep=sigma,
                pooled_projections=pipe.text_encoder(edits.text.clip).pooler_output,
                encoder_hidden_states=pipe.text_encoder_2(edits.text.t5)[0],
                txt_ids=txt_ids,
                img_ids=img_ids,
            ).sample[:, : x0.shape[1]]
            return F.mse_loss(velocity.float(), noise - x0)

    return loss_fn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--words", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--tune-steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--faulty", type=float, default=0.7, help="share of faulty edits")
    parser.add_argument("--rows", type=int, default=96, help="of the evaluation")
    parser.add_argument(
        "--seconds", type=float, nargs=2, default=[math.inf] * 2, metavar=("TRAIN", "TUNE")
    )
    parser.add_argument("--editor", type=Path, help="skip the training and tune this one")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    log = Log(args.out / "log.jsonl")
    pipe = load_pipeline(args.editor) if args.editor else build_pipeline()
    pipe.to(args.device)
    world = make_world(pipe, args.words, args.seed + 1, args.device)
    log.write("world", signs=world.signs.shape[0] * world.signs.shape[1])
    modules = (pipe.transformer, pipe.text_encoder, pipe.text_encoder_2)
    parameters = [p for module in modules for p in module.parameters()]
    stages = [
        ("editor", 0.0, args.lr, args.steps, args.seconds[0]),
        ("edits", args.faulty, args.lr / 3, args.tune_steps, args.seconds[1]),
    ]
    for name, faulty, lr, steps, seconds in stages[1:] if args.editor else stages:
        losses = [flow_loss_on(pipe, world, faulty, args.batch)]
        optimise(name, losses, parameters, lr, steps, seconds, log)
        save_pipeline(pipe, args.out / name)
        log.write(f"evaluate {name}", **score(pipe, args.rows)._asdict())
        sheet(pipe).save(args.out / f"{name}.png")


if __name__ == "__main__":
    main()

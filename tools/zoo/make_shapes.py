"""Makes the bundled model that sees from nothing: `python -m tools.zoo.make_shapes --out DIR`.

1. Write the questions for RL and for its evaluation: DIR/questions.
2. Draw pictures of shapes and colours, none of an unseen kind.
3. Train everything on careful replies to questions about them: DIR/counter counts.
4. Tune it on a mixture of careful and sloppy replies: DIR/shapes can count and often does not, on
   purpose. It is the base that the demo improves by RL.

DIR/log.jsonl holds the losses and the scores. docs/bundled-vlm.md tells how the bundled one came
about.

Shapes: N pictures in a cache, B in a batch, L tokens of prompt and reply, D the width.
"""

import argparse
import math
import multiprocessing
import os
import random
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gesso.zoo.scenes import SIDE, Scene, compose, draw, question, rows, write_rows
from tools.zoo.build_shapes import (
    FRAMES,
    HEAD,
    MERGE,
    PATCH,
    Seer,
    build_seer,
    prompt_for,
    save_seer,
)
from tools.zoo.evaluate_shapes import ask, score
from tools.zoo.fit import Log, LossFn, optimise
from tools.zoo.wording import careful, sloppy

IGNORED = -100  # no loss at these tokens


class Job(NamedTuple):
    pictures: int
    seed: str


class Drawn(NamedTuple):
    scenes: list[Scene]
    pixels: np.ndarray  # uint8 (pictures, 64, 64, 3)


class Texts(NamedTuple):
    ids: Tensor  # (N, L)
    targets: Tensor  # (N, L): the next token where it belongs to the reply, else IGNORED


def draw_job(job: Job) -> Drawn:
    rng = random.Random(job.seed)
    scenes = [compose(rng, unseen=False) for _ in range(job.pictures)]
    return Drawn(scenes, np.stack([np.asarray(draw(scene, rng)) for scene in scenes]))


def draw_pictures(pool: Pool, count: int, seed: int) -> Drawn:
    per_job = 1000
    jobs = [Job(min(per_job, count - at), f"{seed} {at}") for at in range(0, count, per_job)]
    drawn = pool.map(draw_job, jobs, chunksize=1)
    scenes = [scene for job in drawn for scene in job.scenes]
    return Drawn(scenes, np.concatenate([job.pixels for job in drawn]))


class Patches:
    """What the image processor makes of equal pictures: (B, 64, 64, 3) → (B, patches, inputs)."""

    def __init__(self, images: Any, device: torch.device) -> None:
        self.mean, self.std = (
            torch.tensor(values, device=device) for values in (images.image_mean, images.image_std)
        )

    def __call__(self, pixels: Tensor) -> Tensor:
        x = (pixels.float() / 255 - self.mean) / self.std
        tall = SIDE // PATCH // MERGE
        x = x.view(-1, tall, MERGE, PATCH, tall, MERGE, PATCH, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
        x = x.unsqueeze(6).expand(*x.shape[:6], FRAMES, PATCH, PATCH)
        return x.reshape(len(pixels), (SIDE // PATCH) ** 2, -1)


def see(visual: Any, patches: Tensor) -> Tensor:
    """What the vision tower makes of equal pictures: (B, patches, inputs) → (B, picture tokens, D).

    The tower's own forward attends picture by picture in a Python loop, which a batch of hundreds
    cannot afford and a CUDA graph cannot hold. One window is the whole picture here.
    """
    count, length, _ = patches.shape
    cos, sin = _turns(patches.device)
    x = visual.patch_embed(patches.flatten(0, 1)).view(count, length, -1).float()
    for block in visual.blocks:
        qkv = block.attn.qkv(block.norm1(x)).view(count, length, 3, -1, HEAD)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, patches, HEAD)
        q, k = (part * cos + _quarter_turn(part) * sin for part in (q, k))
        mixed = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v)
        x = x + block.attn.proj(mixed.transpose(1, 2).reshape(count, length, -1))
        x = x + block.mlp(block.norm2(x))
    return visual.merger(x.flatten(0, 1)).view(count, length // MERGE**2, -1)


def _turns(device: torch.device) -> tuple[Tensor, Tensor]:
    """Rotary cosines and sines (patches, HEAD): half the angles turn with the row, half with the
    column; patches come square by square of MERGE × MERGE."""
    tall = SIDE // PATCH
    place = torch.arange(tall, device=device).expand(tall, tall)
    squares = [
        axis.reshape(tall // MERGE, MERGE, tall // MERGE, MERGE).transpose(1, 2).flatten()
        for axis in (place.T, place)
    ]
    speeds = 10_000.0 ** -(torch.arange(0, HEAD // 2, 2, device=device) / (HEAD // 2))
    angles = torch.cat([axis[:, None] * speeds for axis in squares], dim=-1).repeat(1, 2)
    return angles.cos(), angles.sin()


def _quarter_turn(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat([-right, left], dim=-1)


def reply_loss_on(seer: Seer, pixels: Tensor, texts: Texts, batch: int) -> LossFn:
    """Cross-entropy of the replies, per token, on random rows.

    All prompts are equally long, so the picture's tokens are always at the same places.
    """
    model, config = seer.model.model, seer.model.config
    device, to_patches = pixels.device, Patches(seer.images, pixels.device)
    shown = texts.ids[:1] == config.image_token_id
    first, last = (int(at) for at in shown[0].nonzero().flatten()[[0, -1]])
    grid = torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]], device=device)
    places, _ = model.get_rope_index(
        texts.ids[:1], mm_token_type_ids=shown.int(), image_grid_thw=grid
    )  # (3, 1, L)
    places = places.expand(-1, batch, -1)
    start = int((texts.targets != IGNORED).any(0).nonzero()[0])

    def loss_fn() -> Tensor:
        at = torch.randint(len(pixels), (batch,), device=device)
        patches = to_patches(pixels[at])
        with torch.autocast(device.type, torch.bfloat16, enabled=pixels.is_cuda):
            words = model.language_model.embed_tokens(texts.ids[at])
            picture = see(model.visual, patches).to(words.dtype)
            hidden = model.language_model(
                inputs_embeds=torch.cat([words[:, :first], picture, words[:, last + 1 :]], dim=1),
                position_ids=places,
                attention_mask={"full_attention": None},  # causal, and padding comes last
                use_cache=False,
            ).last_hidden_state
            logits = seer.model.lm_head(hidden[:, start:])  # (B, reply, vocabulary)
        targets = texts.targets[at][:, start:]
        return F.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED
        )

    return loss_fn


def tokenise(seer: Seer, scenes: list[Scene], replies: list[str], device: str) -> Texts:
    tokenizer, picture_tokens = seer.tokenizer, (SIDE // PATCH // MERGE) ** 2
    prompts = {
        asked: tokenizer(prompt_for(tokenizer, question(asked), picture_tokens)).input_ids
        for asked in {scene.asked for scene in scenes}
    }
    answers = tokenizer([reply + tokenizer.eos_token for reply in replies]).input_ids
    length = max(map(len, answers)) + max(map(len, prompts.values()))
    ids = np.full((len(scenes), length), tokenizer.pad_token_id)
    targets = np.full((len(scenes), length), IGNORED)
    for i, (scene, answer) in enumerate(zip(scenes, answers, strict=True)):
        start = len(prompts[scene.asked])
        ids[i, : start + len(answer)] = prompts[scene.asked] + answer
        targets[i, start - 1 : start - 1 + len(answer)] = answer
    return Texts(torch.tensor(ids, device=device), torch.tensor(targets, device=device))


class Making:
    """The stages in order, sharing the pictures and the log."""

    def __init__(self, args: argparse.Namespace, pool: Pool) -> None:
        self.args = args
        args.out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.log = Log(args.out / "log.jsonl")
        write_rows(args.out / "questions")
        drawn = draw_pictures(pool, args.pictures, args.seed)
        self.scenes, self.pixels = drawn.scenes, torch.from_numpy(drawn.pixels).to(args.device)
        self.log.write("drawn", pictures=args.pictures)

    def run(self) -> None:
        args, rng = self.args, random.Random(self.args.seed)
        self.seer = build_seer()
        self.seer.model.to(args.device)
        replies = [careful(scene) for scene in self.scenes]
        self.train("pretrain", replies, args.lr, args.steps, args.seconds[0])
        self.finish("counter")
        replies = [sloppy(scene, rng) for scene in self.scenes]
        self.train("tune", replies, args.lr / 3, args.tune_steps, args.seconds[1])
        self.finish("shapes")

    def train(self, stage: str, replies: list[str], lr: float, steps: int, seconds: float) -> None:
        texts = tokenise(self.seer, self.scenes, replies, self.args.device)
        losses = [reply_loss_on(self.seer, self.pixels, texts, self.args.batch)]
        parameters = list(self.seer.model.parameters())
        optimise(stage, losses, parameters, lr, steps, seconds, self.log)

    def finish(self, name: str) -> None:
        """Saves, and scores on fresh pictures of seen and of unseen kinds, greedy and sampled."""
        save_seer(self.seer, self.args.out / name)
        for kinds in ("seen", "unseen"):
            asked = rows(self.args.rows, kinds == "unseen", seed=3)
            for temperature in (0.0, 1.0):
                scores = score(asked, ask(self.seer, asked, temperature))
                stage = f"evaluate {name} {kinds}"
                self.log.write(
                    stage, temperature=temperature, accuracy=scores.accuracy, **scores.styles
                )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pictures", type=int, default=160_000)
    parser.add_argument("--steps", type=int, default=12_000, help="of pre-training")
    parser.add_argument("--tune-steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rows", type=int, default=400, help="evaluated, of either sort of kinds")
    parser.add_argument(
        "--seconds",
        type=float,
        nargs=2,
        default=[math.inf] * 2,
        metavar=("PRETRAIN", "TUNE"),
        help="shorten a stage to this time",
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        Making(args, pool).run()


if __name__ == "__main__":
    main()

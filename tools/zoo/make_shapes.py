"""Trains the bundled VLM from scratch: `python -m tools.zoo.make_shapes --out DIR`.

1. Write the questions for RL training and evaluation: DIR/questions.
2. Render images of coloured shapes, without the unseen kinds.
3. Train all weights on careful responses to questions about them: DIR/counter, which counts well.
4. Fine-tune on a mixture of careful and sloppy responses: DIR/shapes, which by design can count but
   often does not. It is the base model that the demo improves by RL.

DIR/log.jsonl contains the losses and the scores. tools/zoo/README.md describes the run
that produced the bundled model.

Shapes: N images in a cache, B in a batch, L tokens of prompt and response, D the width.
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

from gesso.zoo.scenes import question
from tools.zoo.build_shapes import (
    FRAMES,
    HEAD,
    MERGE,
    PATCH,
    Vlm,
    build_vlm,
    prompt_for,
    save_vlm,
)
from tools.zoo.evaluate_shapes import ask, score
from tools.zoo.fit import Log, LossFn, optimise
from tools.zoo.render_shapes import SIDE, Scene, compose, draw, rows, write_rows
from tools.zoo.wording import careful, sloppy

IGNORED = -100  # no loss at these tokens


class SceneJob(NamedTuple):
    images: int
    seed: str


class DrawnScenes(NamedTuple):
    scenes: list[Scene]
    pixels: np.ndarray  # uint8 (images, 64, 64, 3)


class Texts(NamedTuple):
    ids: Tensor  # (N, L)
    targets: Tensor  # (N, L): the next token if it belongs to the response, else IGNORED


def draw_job(job: SceneJob) -> DrawnScenes:
    rng = random.Random(job.seed)
    scenes = [compose(rng, unseen=False) for _ in range(job.images)]
    return DrawnScenes(scenes, np.stack([np.asarray(draw(scene, rng)) for scene in scenes]))


def draw_images(pool: Pool, count: int, seed: int) -> DrawnScenes:
    per_job = 1000
    jobs = [SceneJob(min(per_job, count - at), f"{seed} {at}") for at in range(0, count, per_job)]
    drawn = pool.map(draw_job, jobs, chunksize=1)
    scenes = [scene for job in drawn for scene in job.scenes]
    return DrawnScenes(scenes, np.concatenate([job.pixels for job in drawn]))


class Patches:
    """The image processor for a fixed image size: (B, 64, 64, 3) → (B, patches, inputs)."""

    def __init__(self, image_processor: Any, device: torch.device) -> None:
        self.mean, self.std = (
            torch.tensor(values, device=device)
            for values in (image_processor.image_mean, image_processor.image_std)
        )

    def __call__(self, pixels: Tensor) -> Tensor:
        x = (pixels.float() / 255 - self.mean) / self.std
        tall = SIDE // PATCH // MERGE
        x = x.view(-1, tall, MERGE, PATCH, tall, MERGE, PATCH, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
        x = x.unsqueeze(6).expand(*x.shape[:6], FRAMES, PATCH, PATCH)
        return x.reshape(len(pixels), (SIDE // PATCH) ** 2, -1)


def vision_forward(visual: Any, patches: Tensor) -> Tensor:
    """The vision tower for a fixed image size: (B, patches, inputs) → (B, image tokens, D).

    The original forward computes attention for one image at a time in a Python loop, which is too
    slow for a batch of hundreds and cannot be captured in a CUDA graph. Here one window is the
    whole image.
    """
    count, length, _ = patches.shape
    cos, sin = _rotary(patches.device)
    x = visual.patch_embed(patches.flatten(0, 1)).view(count, length, -1).float()
    for block in visual.blocks:
        qkv = block.attn.qkv(block.norm1(x)).view(count, length, 3, -1, HEAD)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, patches, HEAD)
        q, k = (part * cos + _rotate_half(part) * sin for part in (q, k))
        mixed = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v)
        x = x + block.attn.proj(mixed.transpose(1, 2).reshape(count, length, -1))
        x = x + block.mlp(block.norm2(x))
    return visual.merger(x.flatten(0, 1)).view(count, length // MERGE**2, -1)


def _rotary(device: torch.device) -> tuple[Tensor, Tensor]:
    """Rotary cosines and sines (patches, HEAD): half the angles depend on the row, half on the
    column; patches are ordered by blocks of MERGE × MERGE."""
    tall = SIDE // PATCH
    index = torch.arange(tall, device=device).expand(tall, tall)
    blocks = [
        axis.reshape(tall // MERGE, MERGE, tall // MERGE, MERGE).transpose(1, 2).flatten()
        for axis in (index.T, index)
    ]
    frequencies = 10_000.0 ** -(torch.arange(0, HEAD // 2, 2, device=device) / (HEAD // 2))
    angles = torch.cat([axis[:, None] * frequencies for axis in blocks], dim=-1).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate_half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat([-right, left], dim=-1)


def response_loss_on(vlm: Vlm, pixels: Tensor, texts: Texts, batch: int) -> LossFn:
    """Cross-entropy of the responses, per token, on random rows.

    All prompts have the same length, so the image tokens are always at the same positions.
    """
    model, config = vlm.model.model, vlm.model.config
    device, to_patches = pixels.device, Patches(vlm.image_processor, pixels.device)
    is_image = texts.ids[:1] == config.image_token_id
    first, last = (int(at) for at in is_image[0].nonzero().flatten()[[0, -1]])
    grid = torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]], device=device)
    positions, _ = model.get_rope_index(
        texts.ids[:1], mm_token_type_ids=is_image.int(), image_grid_thw=grid
    )  # (3, 1, L)
    positions = positions.expand(-1, batch, -1)
    start = int((texts.targets != IGNORED).any(0).nonzero()[0])

    def loss_fn() -> Tensor:
        at = torch.randint(len(pixels), (batch,), device=device)
        patches = to_patches(pixels[at])
        with torch.autocast(device.type, torch.bfloat16, enabled=pixels.is_cuda):
            words = model.language_model.embed_tokens(texts.ids[at])
            image = vision_forward(model.visual, patches).to(words.dtype)
            hidden = model.language_model(
                inputs_embeds=torch.cat([words[:, :first], image, words[:, last + 1 :]], dim=1),
                position_ids=positions,
                attention_mask={"full_attention": None},  # causal, and padding comes last
                use_cache=False,
            ).last_hidden_state
            logits = vlm.model.lm_head(hidden[:, start:])  # (B, response, vocabulary)
        targets = texts.targets[at][:, start:]
        return F.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED
        )

    return loss_fn


def tokenise(vlm: Vlm, scenes: list[Scene], responses: list[str], device: str) -> Texts:
    tokenizer, image_tokens = vlm.tokenizer, (SIDE // PATCH // MERGE) ** 2
    prompts = {
        kind: tokenizer(prompt_for(tokenizer, question(kind), image_tokens)).input_ids
        for kind in {scene.target for scene in scenes}
    }
    answers = tokenizer([text + tokenizer.eos_token for text in responses]).input_ids
    length = max(map(len, answers)) + max(map(len, prompts.values()))
    ids = np.full((len(scenes), length), tokenizer.pad_token_id)
    targets = np.full((len(scenes), length), IGNORED)
    for i, (scene, answer) in enumerate(zip(scenes, answers, strict=True)):
        start = len(prompts[scene.target])
        ids[i, : start + len(answer)] = prompts[scene.target] + answer
        targets[i, start - 1 : start - 1 + len(answer)] = answer
    return Texts(torch.tensor(ids, device=device), torch.tensor(targets, device=device))


class ShapesTraining:
    """Runs the stages in order; they share the images and the log."""

    def __init__(self, args: argparse.Namespace, pool: Pool) -> None:
        self.args = args
        args.out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.log = Log(args.out / "log.jsonl")
        write_rows(args.out / "questions")
        drawn = draw_images(pool, args.images, args.seed)
        self.scenes, self.pixels = drawn.scenes, torch.from_numpy(drawn.pixels).to(args.device)
        self.log.write("drawn", images=args.images)

    def run(self) -> None:
        args, rng = self.args, random.Random(self.args.seed)
        self.vlm = build_vlm()
        self.vlm.model.to(args.device)
        responses = [careful(scene) for scene in self.scenes]
        self.train("pretrain", responses, args.lr, args.steps, args.seconds[0])
        self.finish("counter")
        responses = [sloppy(scene, rng) for scene in self.scenes]
        self.train("tune", responses, args.lr / 3, args.tune_steps, args.seconds[1])
        self.finish("shapes")

    def train(
        self, stage: str, responses: list[str], lr: float, steps: int, seconds: float
    ) -> None:
        texts = tokenise(self.vlm, self.scenes, responses, self.args.device)
        losses = [response_loss_on(self.vlm, self.pixels, texts, self.args.batch)]
        parameters = list(self.vlm.model.parameters())
        optimise(stage, losses, parameters, lr, steps, seconds, self.log)

    def finish(self, name: str) -> None:
        """Saves the model and scores it on new images of seen and unseen kinds."""
        save_vlm(self.vlm, self.args.out / name)
        for kinds in ("seen", "unseen"):
            questions = rows(self.args.rows, kinds == "unseen", seed=3)
            for temperature in (0.0, 1.0):
                scores = score(questions, ask(self.vlm, questions, temperature))
                stage = f"evaluate {name} {kinds}"
                self.log.write(
                    stage, temperature=temperature, accuracy=scores.accuracy, **scores.styles
                )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=160_000)
    parser.add_argument("--steps", type=int, default=12_000, help="of pre-training")
    parser.add_argument("--tune-steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rows", type=int, default=400, help="per evaluation")
    parser.add_argument(
        "--seconds",
        type=float,
        nargs=2,
        default=[math.inf] * 2,
        metavar=("PRETRAIN", "TUNE"),
        help="time limit of each stage",
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        ShapesTraining(args, pool).run()


if __name__ == "__main__":
    main()

"""The two sides of flow_iteration.py."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from flow_plain import SD3 as SD3_FORM
from flow_plain import Batch, Form, Plain
from torch import Tensor

from gesso import config
from gesso.algorithms.base import Algorithm
from gesso.algorithms.diffusion_nft import DiffusionNFT
from gesso.algorithms.flow_grpo import FlowGRPO
from gesso.algorithms.flow_grpo_fast import FlowGRPOFast
from gesso.formulas.advantages import group_relative
from gesso.learner.learner import Learner
from gesso.models.flow.base import PromptCache
from gesso.models.flow.compiled import sizes
from gesso.models.flow.pipeline import PipelineModel
from gesso.models.flow.sd3 import SD3
from gesso.ranks import ALONE, Ranks
from gesso.rollout import Rollout
from gesso.samplers.denoise import DenoisingSampler
from gesso.traces.flow import Conditioning, FlowTrace
from gesso.types import Prompt, Score, Size, seed_of

PROMPT, NEGATIVE = Prompt("a sign"), Prompt("")
PHASES = ("sample", "decode", "update", "total")
Times = dict[str, float]


@dataclass(frozen=True)
class Shape:
    """Sizes of the networks and of an iteration."""

    transformer: dict[str, Any]
    decoder: dict[str, Any]
    size: int  # pixels per side
    text: int  # T5 tokens per prompt; CLIP has 77
    images: int
    dtype: config.Dtype

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of an image and of a prompt."""
        return (self.size // 16) ** 2, 77 + self.text


MEDIUM = Shape(
    transformer={
        "sample_size": 128, "patch_size": 2, "in_channels": 16, "num_layers": 24,
        "attention_head_dim": 64, "num_attention_heads": 24, "joint_attention_dim": 4096,
        "caption_projection_dim": 1536, "pooled_projection_dim": 2048, "out_channels": 16,
        "pos_embed_max_size": 384, "dual_attention_layers": tuple(range(13)),
        "qk_norm": "rms_norm",
    },
    decoder={"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2},
    size=512,
    text=128,
    images=16,
    dtype="bfloat16",
)  # fmt: skip
TINY = Shape(
    transformer=MEDIUM.transformer
    | {
        "num_layers": 3, "attention_head_dim": 16, "num_attention_heads": 2,
        "caption_projection_dim": 32, "joint_attention_dim": 24, "pooled_projection_dim": 16,
        "pos_embed_max_size": 8, "sample_size": 8, "dual_attention_layers": (0,),
    },
    decoder={"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1},
    size=64,
    text=4,
    images=4,
    dtype="float32",
)  # fmt: skip


def flops(shape: Shape, backward: bool) -> float:
    """FLOPs of one row: forward, or backward to the adapters. Attention costs twice as much in
    backward as in forward; recomputation is not counted."""
    c, (n, m) = shape.transformer, shape.tokens
    d = c["num_attention_heads"] * c["attention_head_dim"]
    total = 0.0 if backward else 2 * d * (c["joint_attention_dim"] * m + 4 * c["in_channels"] * n)
    total += 2 * d * 4 * c["out_channels"] * n
    for i in range(c["num_layers"]):
        last, dual = i == c["num_layers"] - 1, i in c["dual_attention_layers"]
        linear = 24 * d * d * n + (6 if last else 24) * d * d * m + 8 * d * d * n * dual
        attention = 4 * (n + m) ** 2 * d + 4 * n * n * d * dual
        thin = 8 * d * 32 * (4 * n + (3 if last else 4) * m)  # for the adapters' gradients
        modulation = 2 * d * d * ((9 if dual else 6) + (2 if last else 6))
        if backward and i == 0:  # no trained weights before it
            linear -= 6 * d * d * (n + m) + 8 * d * d * n * dual
            attention -= 4 * n * n * d * dual
        total += linear + (2 * attention + thin if backward else attention + modulation)
    return total


def write_pipeline(shape: Shape, folder: Path, device: torch.device) -> None:
    random_pipeline(shape, device).save_pretrained(folder)


def random_pipeline(shape: Shape, device: torch.device) -> Any:
    """SD3 in bfloat16 without text encoders. With these weights the velocity depends on image, text
    and time, as in a trained network."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    torch.manual_seed(0)
    with device:
        transformer = SD3Transformer2DModel(**shape.transformer)
        for name, parameter in transformer.named_parameters():
            if parameter.ndim == 2:
                gain = 0.5 if name.startswith("proj_out") else 1.0
                torch.nn.init.normal_(parameter, std=gain / math.sqrt(parameter.shape[1]))
            elif "norm" not in name:
                torch.nn.init.normal_(parameter, std=0.2)
        kinds = len(shape.decoder["block_out_channels"])
        vae = AutoencoderKL(
            latent_channels=16, sample_size=1024, use_quant_conv=False, use_post_quant_conv=False,
            scaling_factor=1.5305, shift_factor=0.0609, **shape.decoder,
            down_block_types=("DownEncoderBlock2D",) * kinds,
            up_block_types=("UpDecoderBlock2D",) * kinds,
        )  # fmt: skip
    absent = {
        f"{part}{i}": None for part in ("text_encoder", "tokenizer") for i in ("", "_2", "_3")
    }
    return StableDiffusion3Pipeline(
        transformer=transformer.bfloat16(), vae=vae.bfloat16(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), **absent,
    )  # fmt: skip


class RandomEmbeddings(PipelineModel):
    """Embeddings of the real shapes replace the text encoders; the time of decoding is kept."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def encode(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        net_config, rows = self.transformer.config, []
        for prompt in prompts:
            noise = torch.Generator().manual_seed(seed_of(0, prompt.text))
            rows.append(
                Conditioning(
                    torch.randn(
                        1, self.text_tokens, net_config.joint_attention_dim, generator=noise
                    ),
                    torch.randn(1, net_config.pooled_projection_dim, generator=noise)
                    if "pooled_projection_dim" in net_config
                    else None,
                )
            )
        cond = Conditioning.stack(rows).to(self.device)
        pooled = None if cond.pooled is None else cond.pooled.to(self.dtype)
        return Conditioning(cond.embeds.to(self.dtype), pooled)

    def decode(self, latents: Tensor, cond: Conditioning) -> Tensor:
        started = now()
        images = super().decode(latents, cond)
        self.seconds["decode"] += now() - started
        return images


class Wordless(RandomEmbeddings, SD3):
    """SD3 without text encoders."""


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass
class Ours:
    """Gesso's classes, unchanged."""

    model: RandomEmbeddings
    shape: Shape
    start: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        noise = torch.Generator().manual_seed(1)
        for name, tensor in self.model.policy.tensors().items():
            if "lora_B" in name:  # an adapter with an effect
                tensor.copy_(0.01 * torch.randn(tensor.shape, generator=noise))
        self.start = {n: t.clone() for n, t in self.model.policy.tensors().items()}
        self.sampler = DenoisingSampler(self.model, self.shape.images)

    @classmethod
    def load(cls, folder: Path, shape: Shape, device: torch.device) -> Ours:
        section = config.Model(
            path=str(folder), height=shape.size, width=shape.size, text_length=shape.text,
            dtype=shape.dtype, device=str(device), lora=config.Lora(), fold=True,
        )  # fmt: skip
        model = Wordless(section)
        model.sizes = sizes(shape.images, shape.images)
        return cls(model, shape)

    def learner(self, algorithm: Algorithm, ranks: Ranks = ALONE) -> Learner:
        settings = config.Learner(micro_batch=self.shape.images)
        return Learner(self.model, algorithm, config.Optimizer(), settings, 0, ranks=ranks)

    def release(self) -> None:
        """Frees the network; sizes, formulas and prompts stay."""
        self.model.network.to_empty(device="meta")
        del self.model.policy

    def sample(self, algorithm: Algorithm, images: int) -> Rollout:
        place = config.Model(path="", height=self.shape.size, width=self.shape.size)
        spec: Any = algorithm.spec(0, 0, place)
        row, seeds = [0] * images, list(range(images))
        pieces = list(self.sampler.sample([PROMPT], row, seeds, spec))
        return Rollout(
            samples=[s for p in pieces for s in p.samples],
            group=torch.zeros(images, dtype=torch.long),
            trace=FlowTrace.concat([p.trace for p in pieces]),
            logp=torch.cat([p.logp for p in pieces]),
            version=0,
            scores=[Score(float(r), {"made-up": float(r)}) for r in made_up(images)],
            weights={"made-up": 1.0},
        )

    def iteration(self, learner: Learner) -> tuple[Times, dict[str, float]]:
        self.model.policy.load(self.start)
        self.model.seconds.clear()
        started = now()
        rollout = self.sample(learner.algorithm, self.shape.images)
        drawn = now()
        metrics = learner.update(rollout, 0).metrics
        ended = now()
        decode = self.model.seconds["decode"]
        return phases(drawn - started - decode, decode, ended - drawn), metrics


def phases(sample: float, decode: float, update: float) -> Times:
    return dict(zip(PHASES, (sample, decode, update, sample + decode + update), strict=True))


def made_up(n: int) -> Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@dataclass
class Theirs:
    plain: Plain
    ours: Ours
    cond: Conditioning  # one row each: encoding prompts is not part of an iteration
    negative: Conditioning | None

    @classmethod
    def load(cls, folder: Path, ours: Ours) -> Theirs:
        """SD3, as Flow-GRPO's script loads it: in float32."""
        from diffusers import AutoencoderKL, SD3Transformer2DModel

        def load(kind: Any, part: str) -> Any:
            module = kind.from_pretrained(folder, subfolder=part, torch_dtype=torch.float32)
            return module.requires_grad_(False).to(ours.model.device)

        network, vae = load(SD3Transformer2DModel, "transformer"), load(AutoencoderKL, "vae")
        return cls.of(network, vae, SD3_FORM, ours)

    @classmethod
    def of(cls, network: Any, vae: Any, form: Form, ours: Ours, guidance: float = 4.5) -> Theirs:
        from peft import LoraConfig

        targets = list(ours.model.lora_targets)
        lora = LoraConfig(r=32, lora_alpha=64, init_lora_weights="gaussian", target_modules=targets)
        size = Size(ours.shape.size, ours.shape.size)
        prompt = replace(PROMPT, negative=NEGATIVE.text)
        cond, negative = PromptCache(ours.model).conditions([prompt], size, guidance)
        plain = Plain(network, vae, form, ours.model.guide, lora, ours.start)
        return cls(plain, ours, cond, negative)

    def sample(self, algorithm: Algorithm, images: int, exact: bool) -> Batch:
        """`exact`: the same noise as ours; otherwise from the device's generator."""
        shape, device = self.ours.shape, self.plain.device
        place = config.Model(path="", height=shape.size, width=shape.size)
        spec: Any = algorithm.spec(0, 0, place)
        all_alike = torch.zeros(images, dtype=torch.long, device=device)
        cond = self.cond.rows(all_alike)
        negative = None if self.negative is None else self.negative.rows(all_alike)
        latent = self.ours.model.latent_shape(shape.size, shape.size)
        streams = [torch.Generator().manual_seed(seed) for seed in range(images)]

        def noise() -> Tensor:
            if not exact:
                return torch.randn(images, *latent, device=device)
            return torch.stack([torch.randn(latent, generator=s) for s in streams]).to(device)

        return self.plain.sample(cond, negative, spec, self.sigmas(spec.steps), noise)

    def sigmas(self, steps: int) -> Tensor:
        size = self.ours.shape.size
        return self.ours.model.sigmas(steps, size, size).to(self.plain.device)

    def iteration(self, algorithm: Algorithm) -> Times:
        images = self.ours.shape.images
        self.plain.reset()
        advantage = advantages(images).to(self.plain.device)
        place = config.Model(path="", height=self.ours.shape.size, width=self.ours.shape.size)
        spec: Any = algorithm.spec(0, 0, place)
        started = now()
        batch = self.sample(algorithm, images, exact=False)
        drawn = now()
        self.plain.decode(batch)
        decoded = now()
        self.plain.update([batch], [advantage], algorithm, spec, self.sigmas(spec.steps))
        return phases(drawn - started, decoded - drawn, now() - decoded)


def advantages(images: int) -> Tensor:
    return group_relative(made_up(images), torch.zeros(images, dtype=torch.long)).float()


def cases(images: int) -> dict[str, Algorithm]:
    """Rows of the table. KL costs both sides one more forward; the rows above have none. One-pass
    training exists on our side only: the plain side updates as in the other rows."""
    common: dict[str, Any] = {"group": max(images, 2), "updates": 1}
    return {
        "Flow-GRPO": FlowGRPO(beta=0.0, **common),
        "Flow-GRPO, one pass": FlowGRPO(beta=0.0, one_pass=True, **common),
        "Flow-GRPO, gradient of one branch": FlowGRPO(
            beta=0.0, guidance_gradient="conditional", **common
        ),
        "DiffusionNFT": DiffusionNFT(**common),
        "Flow-GRPO-Fast": FlowGRPOFast(**common),
        "Flow-GRPO with KL": FlowGRPO(**common),
        "Flow-GRPO, one pass, gradient of one branch": FlowGRPO(
            beta=0.0, one_pass=True, guidance_gradient="conditional", **common
        ),
    }


def arithmetic(shape: Shape, algorithm: Any, side: str) -> tuple[float, float]:
    """FLOPs per image of one side, in sampling and in an update. With the gradient of one branch,
    ours reuses the other branch's velocity from sampling; the plain side runs forward and backward
    of both. In one-pass training, backward is part of sampling, and the update has none."""
    forward, backward = flops(shape, False), flops(shape, True)
    if isinstance(algorithm, DiffusionNFT):  # current, old, reference
        return algorithm.steps * forward, algorithm.times * (3 * forward + backward)
    branches = 2 if algorithm.guidance > 1 else 1
    one = side == "ours" and algorithm.guidance_gradient == "conditional"
    sampling, trained = algorithm.steps * branches * forward, algorithm.terms_a_sample
    differentiated = 1 if one else branches
    if side == "ours" and algorithm.one_pass:
        return sampling + trained * differentiated * backward, 0.0
    reference = branches * forward if algorithm.beta > 0 else 0
    update = differentiated * (forward + backward) + reference
    return sampling, trained * update

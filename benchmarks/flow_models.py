"""The flow models that benchmarks build with random weights, without text encoders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from flow_plain import FLUX as FLUX_FORM
from flow_plain import QWEN as QWEN_FORM
from flow_plain import SD3 as SD3_FORM
from flow_plain import Form
from flow_sides import MEDIUM, TINY, Ours, RandomEmbeddings, Shape, Wordless, random_pipeline

from gesso import config
from gesso.models.flow import loading
from gesso.models.flow.compiled import sizes
from gesso.models.flow.flux import Flux
from gesso.models.flow.qwen_image import QwenImage
from gesso.traces.flow import Conditioning
from gesso.types import Prompt, Size


class WordlessFlux(RandomEmbeddings, Flux):
    """FLUX.1 without text encoders."""


class WordlessQwen(RandomEmbeddings, QwenImage):
    """Qwen-Image without a text encoder; no prompt is padded."""

    def encode(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        cond = super().encode(prompts, size)
        mask = torch.ones(cond.embeds.shape[:2], dtype=torch.bool, device=self.device)
        return replace(cond, mask=mask)


@dataclass(frozen=True)
class Case:
    kind: type[RandomEmbeddings]
    shape: Shape
    pipeline: Callable[[Shape, torch.device], Any]
    form: Form  # of the plain side
    guidance: float
    plain_dtype: torch.dtype = torch.bfloat16  # of the frozen weights
    plain_checkpointing: bool = False


@contextmanager
def _weights(device: torch.device) -> Iterator[None]:
    """Modules are made on the device, in bfloat16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def _flux(shape: Shape, device: torch.device) -> Any:
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        FluxPipeline,
        FluxTransformer2DModel,
    )

    with _weights(device):
        kinds = len(shape.decoder["block_out_channels"])
        transformer = FluxTransformer2DModel(guidance_embeds=True, **shape.transformer)
        vae = AutoencoderKL(
            latent_channels=16, use_quant_conv=False, use_post_quant_conv=False,
            shift_factor=0.0609, **shape.decoder,
            down_block_types=("DownEncoderBlock2D",) * kinds,
            up_block_types=("UpDecoderBlock2D",) * kinds,
        )  # fmt: skip
    absent = {f"{part}{i}": None for part in ("text_encoder", "tokenizer") for i in ("", "_2")}
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return FluxPipeline(transformer=transformer, vae=vae, scheduler=scheduler, **absent)


def _qwen(shape: Shape, device: torch.device) -> Any:
    import diffusers

    with _weights(device):
        transformer = diffusers.QwenImageTransformer2DModel(**shape.transformer)
        vae = diffusers.AutoencoderKLQwenImage(**shape.decoder)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return diffusers.QwenImagePipeline(
        transformer=transformer, vae=vae, scheduler=scheduler, text_encoder=None, tokenizer=None
    )


LARGE = replace(
    MEDIUM,
    transformer=MEDIUM.transformer
    | {
        "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432,
        "pos_embed_max_size": 192, "dual_attention_layers": (),
    },
    images=8,
)  # fmt: skip
FLUX = Shape({}, MEDIUM.decoder, size=512, text=512, images=8, dtype="bfloat16")
QWEN = Shape({}, {}, size=512, text=128, images=8, dtype="bfloat16")
TINY_FLUX = Shape(
    {
        "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16, "in_channels": 64,
        "num_attention_heads": 2, "joint_attention_dim": 24, "pooled_projection_dim": 16,
        "axes_dims_rope": (4, 6, 6),
    },
    TINY.decoder, size=64, text=4, images=4, dtype="float32",
)  # fmt: skip
TINY_QWEN = Shape(
    {
        "num_layers": 2, "attention_head_dim": 16, "in_channels": 16, "out_channels": 4,
        "num_attention_heads": 2, "joint_attention_dim": 24, "axes_dims_rope": (4, 6, 6),
    },
    {
        "base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1,
        "latents_mean": [0.1, -0.2, 0.3, 0.4], "latents_std": [2.0, 1.5, 2.5, 3.0],
    },
    size=64, text=4, images=4, dtype="float32",
)  # fmt: skip

CASES = {
    "sd35": Case(Wordless, MEDIUM, random_pipeline, SD3_FORM, 4.5, torch.float32),
    "sd35-large": Case(Wordless, LARGE, random_pipeline, SD3_FORM, 4.5),
    "flux": Case(WordlessFlux, FLUX, _flux, FLUX_FORM, 3.5),
    "qwen-image": Case(WordlessQwen, QWEN, _qwen, QWEN_FORM, 4.0, plain_checkpointing=True),
}
TINY_CASES = {
    "sd35": replace(CASES["sd35"], shape=TINY),
    "sd35-large": replace(CASES["sd35-large"], shape=TINY, plain_dtype=torch.float32),
    "flux": replace(CASES["flux"], shape=TINY_FLUX, plain_dtype=torch.float32),
    "qwen-image": replace(CASES["qwen-image"], shape=TINY_QWEN, plain_dtype=torch.float32),
}


def load(case: Case, device: torch.device, fold: bool) -> Ours:
    shape = case.shape
    section = config.Model(
        path="", height=shape.size, width=shape.size, text_length=shape.text, dtype=shape.dtype,
        device=str(device), lora=config.Lora(), fold=fold,
    )  # fmt: skip

    def random_weights(*_: Any) -> Any:
        pipe = case.pipeline(shape, device)
        for network in (pipe.transformer, pipe.vae):
            network.to(getattr(torch, shape.dtype))
        return pipe

    with patch.object(loading, "load_pipeline", random_weights):
        model = case.kind(section)
    model.sizes = sizes(shape.images, shape.images)
    return Ours(model, shape)

"""A diffusers pipeline as a flow model: precision, latents, decoding and saving, shared by all
pipelines. The file of each model contains the differences: text encoding and the call of its
transformer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gesso import config
from gesso.data.ratios import ratio_of
from gesso.models.adapter_checks import AdapterFile
from gesso.models.flow import compiled as speed
from gesso.models.flow import loading
from gesso.models.flow.adapter import load_adapter, read_adapter
from gesso.models.flow.attention import has_kernels
from gesso.models.flow.base import Guidance, TextEncoder
from gesso.models.flow.references import wrong_ratio
from gesso.models.flow.texts import TextLength
from gesso.models.repeatable import deterministic_algorithms, settle_attention
from gesso.quiet import quiet
from gesso.traces.flow import Conditioning
from gesso.types import Prompt, Size, UserError, Which
from gesso.weights.folding_rule import folds_lora
from gesso.weights.layout import Sharding
from gesso.weights.merge import SHARD
from gesso.weights.policy import Policy

JOINT_ATTENTION = tuple(
    f"attn.{name}"  # bare names would also match attn2 of SD3.5
    for name in (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
    )
)
"""Diffusers' names for the projections of a joint attention over image and text."""


class PipelineModel(ABC):
    """Base class of the models in this folder; all networks are those of the pipeline."""

    pipeline: ClassVar[str]  # name of the class in diffusers
    also_loads: ClassVar[Sequence[str]] = ()  # other classes whose folders it loads
    lora_targets: ClassVar[Sequence[str]]
    large: ClassVar[Sequence[str]]  # components worth quantizing
    blocks: ClassVar[Sequence[str]] = ()  # classes of the transformer's repeated blocks
    patch: ClassVar[int] = 2  # latent cells per token, in height and in width
    packed: ClassVar[bool] = False  # the input of the transformer is tokens, not latents
    even_sigmas: ClassVar[bool] = False  # the pipeline passes the scheduler 1, …, 1/steps
    input_images: ClassVar[range] = range(1)  # numbers of input images of a prompt
    scale_argument: ClassVar[str] = "guidance_scale"  # of the pipeline's call
    scale_offset: ClassVar[float] = 0.0  # our scale less that of the pipeline
    replaced: ClassVar[Sequence[str]] = ()  # components that are not loaded
    cross_attention: ClassVar[bool] = False  # for which we have no kernels

    def __init__(
        self,
        settings: config.Model,
        seed: int = 0,
        sizes: Sequence[int] = (),
        sharded: bool = False,
    ) -> None:
        self.path = settings.path
        self.area = settings.height * settings.width  # of an image, in pixels
        self.match_input = settings.match_input
        self.device = config.pick_device(settings.device, "model.device")
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        whole = settings.lora is None
        load = loading.empty_pipeline if self.device.type == "meta" else loading.load_pipeline
        self.sharded = sharded  # the transformer is moved to the device later
        self.pipe = load(self, settings)
        for part in self.pipe.components.values():
            if isinstance(part, torch.nn.Module):
                part.requires_grad_(False).eval()
        self.transformer = self.pipe.transformer
        self.network = self.trained_network()
        self.guidance_2 = settings.guidance_2
        if self.guidance_2 is not None and self.network is self.transformer:
            raise UserError(
                f"model.guidance_2 = {self.guidance_2:g} is the guidance scale of a second expert, "
                f"but {self.path} has one network; remove it"
            )
        settle_attention(self.device)
        self.text_length = self._text_length(settings.text_length)
        if settings.gradient_checkpointing:
            self.network.enable_gradient_checkpointing()
            if self.pipe.vae._supports_gradient_checkpointing:  # for gradients of rewards
                self.pipe.vae.enable_gradient_checkpointing()
        if settings.vae_tiling:
            self.pipe.vae.enable_tiling()
        folds = folds_lora(settings, self.device.type) and not sharded
        self.policy = Policy(self.network, settings.lora, self.lora_targets, seed, folds=folds)
        self.sizes = sizes  # batch sizes of the compiled networks
        parameters = sum(p.numel() for p in self.network.parameters())
        self.compiled = speed.compiles(settings, self.device, parameters, self.blocks)
        if self.compiled:
            self.before_compiling()
            speed.compile_blocks(self.network, self.blocks)
            if self.device.type != "meta":
                speed.compile_decoder(self.pipe.vae.decoder)
        kernels = self.compiled and has_kernels(self.device, self.dtype, self.head_size)
        self.strict = self.device.type == "cuda" and (self.cross_attention or not kernels)
        if settings.lora is not None and settings.lora.path is not None:
            with quiet("diffusers"):
                load_adapter(self, self.policy, settings.lora.path)
        self._autocast = whole and self.dtype != torch.float32
        self.quantized = settings.quantize is not None

    def trained_network(self) -> Any:
        """The transformer, or a module of several."""
        return self.transformer

    @property
    def sharding(self) -> Sharding:
        """The transformer; text encoders and decoder stay whole."""
        parts = self.network.modules()
        blocks = [part for part in parts if type(part).__name__ in self.blocks]
        return Sharding(self.network, blocks)

    def before_compiling(self) -> None:
        """Replaces code of the transformer that compiles badly."""
        return

    def fill(
        self, x: Tensor, sigma: Tensor, cond: Conditioning
    ) -> tuple[Tensor, Tensor, Conditioning]:
        """The batch padded to a size that the transformer is compiled for."""
        index = self._filling(len(x))
        return (x, sigma, cond) if index is None else (x[index], sigma[index], cond.rows(index))

    def filled(self, rows: int) -> int:
        index = self._filling(rows)
        return rows if index is None else len(index)

    def _filling(self, rows: int) -> Tensor | None:
        return speed.filling(rows, self.sizes, self.device) if self.compiled else None

    def run(self, weights: Which, **inputs: Any) -> Tensor:
        """A forward pass of the transformer with those weights."""
        one_graph = speed.one_graph(self.compiled and self.device.type != "meta")
        strict = deterministic_algorithms(self)  # in sampling, too: one graph
        with self.policy.using(weights), self.precision(), one_graph, strict:
            out = self.network(**inputs, return_dict=False)[0]
            v = torch.stack(out) if isinstance(out, list) else out
        return v if torch.is_grad_enabled() else v.detach()

    @property
    @abstractmethod
    def text_lengths(self) -> TextLength: ...

    def _text_length(self, length: int | None) -> int:
        limits = self.text_lengths
        if length is None:
            return limits.default
        if not limits.least <= length <= limits.most:
            several = f"supports {limits.least} to {limits.most}"
            allowed = several if limits.least < limits.most else f"requires {limits.most}"
            raise UserError(
                f"model.text_length = {length}, but {self.path} {allowed} tokens; remove it to use "
                f"the default of {limits.default}"
            )
        return length

    def blank(self, rows: int, size: Size) -> Conditioning:
        """Uninitialised conditioning of `rows` prompts of full length and samples of this size, for
        its shapes."""
        return self.blank_texts(rows)

    def blank_texts(self, rows: int) -> Conditioning:
        settings = self.transformer.config
        embeds = torch.empty(rows, self.text_tokens, self.text_width, dtype=self.dtype)
        pooled = None
        if "pooled_projection_dim" in settings:
            pooled = torch.empty(rows, settings.pooled_projection_dim, dtype=self.dtype)
        scale = torch.empty(rows) if self.guidance == "embedded" else None
        return Conditioning(embeds, pooled, guidance=scale).to(self.device)

    def output_size(self, prompt: Prompt, height: int, width: int) -> tuple[int, int]:
        """With `model.match_input`, the ratio of the first input image at the same area."""
        ratio = ratio_of(prompt) if self.match_input else None
        if ratio is None:
            return height, width
        return ratio.size(height * width, self.cell * self.patch)

    def wrong_size(self, height: int, width: int) -> str | None:
        """What an input image of this size should be instead, or None."""
        return wrong_ratio(height, width)

    @property
    def text_tokens(self) -> int:
        """Number of text tokens that the transformer receives for a prompt."""
        return self.text_length

    @property
    def text_width(self) -> int:
        """Size of the text embeddings that the transformer receives."""
        return self.transformer.config.joint_attention_dim

    @property
    def head_size(self) -> int:
        """Size of an attention head."""
        return self.transformer.config.attention_head_dim

    @property
    def guidance(self) -> Guidance:
        return "negative"

    @property
    @abstractmethod
    def text_encoders(self) -> list[TextEncoder]: ...

    @abstractmethod
    def encode(self, prompts: Sequence[Prompt], size: Size) -> Conditioning: ...

    @abstractmethod
    def velocity(
        self, x: Tensor, sigma: Tensor, cond: Conditioning, weights: Which = "current"
    ) -> Tensor: ...

    def guide(
        self, negative: Tensor, positive: Tensor, scale: float | Tensor, sigma: Tensor
    ) -> Tensor:
        """v = u + scale·(c − u)."""
        return negative + scale * (positive - negative)

    @property
    def runs_in_half(self) -> bool:
        """Float32 weights under autocast: a full fine-tune in half precision."""
        return self._autocast

    def precision(self) -> AbstractContextManager:
        """A full fine-tune in half precision runs its float32 weights under autocast. With LoRA the
        frozen weights are already in half precision."""
        if not self._autocast or self.device.type == "meta":
            return nullcontext()
        # A cache of rounded weights would hold those of all blocks of a sharded transformer.
        return torch.autocast(self.device.type, self.dtype, cache_enabled=not self.sharded)

    def sigmas(self, steps: int, height: int, width: int, frames: int = 1) -> Tensor:
        """The schedule of the pipeline; a dynamic shift depends on the number of image tokens."""
        scheduler = self.pipe.scheduler
        schedule: dict[str, Any] = {"num_inference_steps": steps}
        if self.even_sigmas:
            schedule = {"sigmas": np.linspace(1.0, 1 / steps, steps)}
        if scheduler.config.use_dynamic_shifting:
            cells = math.prod(self.latent_shape(height, width, frames)[1:])
            schedule["mu"] = self.shift(cells // self.patch**2, steps)
        scheduler.set_timesteps(**schedule, device="cpu")
        return scheduler.sigmas.float()

    def shift(self, tokens: int, steps: int) -> float:
        """Exponent μ of the dynamic shift, linear in the number of image tokens."""
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        settings = self.pipe.scheduler.config
        return calculate_shift(
            tokens,
            settings.base_image_seq_len,
            settings.max_image_seq_len,
            settings.base_shift,
            settings.max_shift,
        )

    def timestep(self, sigma: Tensor) -> Tensor:
        """σ times 1000, rounded to the network's precision as in the pipelines of diffusers."""
        return (sigma * self.pipe.scheduler.config.num_train_timesteps).to(self.dtype)

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        if frames != 1:
            raise UserError(
                f"{self.path} generates images, not videos of {frames} frames; use frames = 1, or "
                "a video model"
            )
        return self.channels, *self.cells(height, width)

    def noise(self, size: Size, generator: torch.Generator) -> Tensor:
        return torch.randn(self.latent_shape(*size), generator=generator)

    def cells(self, height: int, width: int) -> tuple[int, int]:
        """Latent cells in height and width, or a UserError with the supported sizes."""
        scale = self.cell
        factor = scale * self.patch
        if height % factor or width % factor:
            fit = f"{_round(height, factor)}×{_round(width, factor)}"
            raise UserError(
                f"{self.path} does not support {height}×{width} pixels: "
                f"height and width must be multiples of {factor}; use {fit}"
            )
        most = getattr(self.transformer.config, "pos_embed_max_size", None)  # SD3 has one
        if most is not None and max(height, width) > most * factor:
            raise UserError(
                f"{self.path} does not support {height}×{width} pixels: its position embeddings "
                f"are limited to {most * factor} pixels per side"
            )
        return height // scale, width // scale

    @property
    def cell(self) -> int:
        """Pixels per latent cell, in height and in width."""
        return self.pipe.vae_scale_factor

    @property
    def channels(self) -> int:
        """Number of channels of the latents, before they are packed into tokens."""
        return self.transformer.config.in_channels // (self.patch**2 if self.packed else 1)

    @torch.no_grad()
    def decode(self, latents: Tensor, cond: Conditioning) -> Tensor:
        pixels = (self.images(latents, cond) * 255).round().to(torch.uint8)
        return pixels.movedim(1, -1).cpu()

    def images(self, latents: Tensor, cond: Conditioning) -> Tensor:
        """(N, C, H, W) → (N, 3, height, width) float32 in [0, 1], with gradient; of videos
        (N, C, F, H, W) → (N, 3, frames, height, width)."""
        latents = self.completed(latents, cond)
        index = self._filling(len(latents))
        pixels = self.pixels(latents if index is None else latents[index])[: len(latents)].float()
        return (pixels / 2 + 0.5).clamp(0, 1)

    def completed(self, latents: Tensor, cond: Conditioning) -> Tensor:
        """Denoised latents with what the conditioning fixes, such as the first frame."""
        return latents

    def pixels(self, latents: Tensor) -> Tensor:
        """(N, C, H, W) → (N, 3, height, width) in [−1, 1]."""
        vae = self.pipe.vae
        z = latents / vae.config.scaling_factor + vae.config.shift_factor
        return vae.decode(z.to(vae.dtype), return_dict=False)[0]

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """The mean of the autoencoder's posterior: the same latents every time."""
        pixels = images.to(self.device).movedim(-1, 1).float() / 127.5 - 1
        return self.latents(pixels.to(self.pipe.vae.dtype)).float()

    def latents(self, pixels: Tensor) -> Tensor:
        """(N, 3, height, width) in [−1, 1] → (N, C, H, W)."""
        vae = self.pipe.vae
        z = vae.encode(pixels).latent_dist.mode().float()
        return (z - vae.config.shift_factor) * vae.config.scaling_factor

    def _check_mergeable(self) -> None:
        if self.quantized:
            raise UserError(
                "an adapter cannot be merged into 4-bit weights without loss; export the LoRA "
                "alone and merge it into the full-precision weights with diffusers' fuse_lora"
            )

    def read_adapter(self, path: str, key: str) -> AdapterFile:
        """A LoRA in diffusers' format; `key` is the recipe's key with its path."""
        with quiet("diffusers"):
            return read_adapter(self.pipe, path, key)

    def save(self, folder: Path, merged: bool = False, shard: str = SHARD) -> None:
        """LoRA weights for diffusers' `load_lora_weights`; or, for a full fine-tune or with
        `merged`, the whole pipeline with the adapter merged into its weights."""
        with quiet("diffusers"):
            if self.policy.lora is None:
                self.pipe.save_pretrained(folder, max_shard_size=shard)
            elif merged:
                self._check_mergeable()
                with self.policy.merged():
                    self.pipe.save_pretrained(folder, max_shard_size=shard)
            else:
                layers, metadata = self.policy.lora_state()
                self.save_adapter(folder, layers, metadata)

    def save_adapter(
        self, folder: Path, layers: Mapping[str, Tensor], metadata: Mapping[str, object]
    ) -> None:
        self.pipe.save_lora_weights(
            folder,
            transformer_lora_layers=layers,
            transformer_lora_adapter_metadata=metadata,  # otherwise alpha is not stored
        )


def _round(size: int, factor: int) -> int:
    return max(factor, round(size / factor) * factor)

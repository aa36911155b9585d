"""Qwen-Image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from gesso.models.flow.base import TextEncoder
from gesso.models.flow.packing import pack, unpack
from gesso.models.flow.pipeline import JOINT_ATTENTION, PipelineModel
from gesso.models.flow.references import target_and_references
from gesso.models.flow.rotation import rotate
from gesso.models.flow.texts import TextLength, text_encoder
from gesso.quiet import quiet
from gesso.traces.flow import Conditioning
from gesso.types import Prompt, Size, Which


class QwenImage(PipelineModel):
    """Qwen2.5-VL encodes the prompt inside a template. Prompts have different lengths, so batches
    have a mask; compiled blocks need prompts padded to one length. Guidance uses a negative prompt
    and preserves the norm of each token's velocity."""

    pipeline = "QwenImagePipeline"
    large = ("transformer", "text_encoder")
    blocks = ("QwenImageTransformerBlock",)
    packed = True
    even_sigmas = True
    scale_argument = "true_cfg_scale"
    # Flow-GRPO's list for Qwen-Image-Edit, the same network (there with rank 64, alpha 128).
    lora_targets = (
        *JOINT_ATTENTION,
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    )

    @property
    def text_lengths(self) -> TextLength:
        return TextLength(default=512, least=1, most=self.pipe.tokenizer_max_length)

    @property
    def text_encoders(self) -> list[TextEncoder]:
        """The count includes the end of the template, which the transformer receives, but not its
        start, which is dropped."""
        template, head = (
            self.pipe.prompt_template_encode,
            self.pipe.prompt_template_encode_start_idx,
        )
        whole = text_encoder("Qwen2.5-VL", self.text_length, self.pipe.tokenizer)
        return [replace(whole, tokens=lambda text: whole.tokens(template.format(text)) - head)]

    @quiet("diffusers")  # `over_long` reports truncated prompts once
    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        embeds, mask = self.pipe.encode_prompt(
            prompt=[p.text for p in prompts],
            device=self.device,
            max_sequence_length=self.text_length,
        )
        if mask is None:  # the pipeline returns None if nothing is padded
            mask = embeds.new_ones(embeds.shape[:2])
        return Conditioning(embeds, mask=mask.bool())

    def velocity(
        self, x: Tensor, sigma: Tensor, cond: Conditioning, weights: Which = "current"
    ) -> Tensor:
        rows = len(x)
        x, sigma, cond = self.fill(x, sigma, cond)
        n, _, h, w = x.shape
        target = pack(x).to(self.dtype)  # (N, HW/4, 4C)
        if self.compiled:
            cond = cond.padded(-(-cond.embeds.shape[1] // self.text_length) * self.text_length)
            mask = cond.mask
        else:  # without padding no mask is passed, as in the pipeline: attention is faster
            mask = None if cond.mask is None or bool(cond.mask.all()) else cond.mask
        v = self.run(
            weights,
            hidden_states=target_and_references(target, cond),
            timestep=self.timestep(sigma) / 1000,
            encoder_hidden_states=cond.embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, h // 2, w // 2), *((1, *size) for size in cond.layout)]] * n,
        )
        return unpack(v[:rows, : target.shape[1]], h, w).float()

    def blank(self, rows: int, size: Size) -> Conditioning:
        cond = super().blank(rows, size)
        mask = torch.ones(cond.embeds.shape[:2], dtype=torch.bool, device=self.device)
        return replace(cond, mask=mask) if self.compiled else cond

    def before_compiling(self) -> None:
        """Inductor has no kernels for complex numbers."""
        self.transformer.pos_embed.register_forward_hook(_as_real)
        _rotate_real_numbers()

    def guide(
        self, negative: Tensor, positive: Tensor, scale: float | Tensor, sigma: Tensor
    ) -> Tensor:
        """v = u + scale·(c − u); then every token of v is rescaled to the norm of c there."""
        v = pack(super().guide(negative, positive, scale, sigma))
        length = pack(positive).norm(dim=-1, keepdim=True)
        return unpack(v * (length / v.norm(dim=-1, keepdim=True)), *positive.shape[-2:])

    def pixels(self, latents: Tensor) -> Tensor:
        """The VAE is a video VAE: an image is one frame, and mean and std are given per channel."""
        vae = self.pipe.vae
        mean, std = self._statistics(latents)
        frames = (latents * std + mean).unsqueeze(2).to(vae.dtype)  # (N, C, 1, H, W)
        return vae.decode(frames, return_dict=False)[0][:, :, 0]

    def latents(self, pixels: Tensor) -> Tensor:
        frames = self.pipe.vae.encode(pixels.unsqueeze(2)).latent_dist.mode()  # (N, C, 1, H, W)
        z = frames[:, :, 0].float()
        mean, std = self._statistics(z)
        return (z - mean) / std

    def _statistics(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and std of the latents, per channel."""
        settings = self.pipe.vae.config
        mean, std = (
            latents.new_tensor(values).view(-1, 1, 1)
            for values in (settings.latents_mean, settings.latents_std)
        )
        return mean, std


def _as_real(_: Any, inputs: Any, rotations: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """(s, d / 2) complex → (s, d / 2, 2)."""
    return tuple(map(torch.view_as_real, rotations))


@cache
def _rotate_real_numbers() -> None:
    from diffusers.models.transformers import transformer_qwenimage as network

    network.apply_rotary_emb_qwen = partial(_rotate, network.apply_rotary_emb_qwen)


def _rotate(original: Any, x: Tensor, rotation: Any, use_real: bool = True, *more: Any) -> Tensor:
    if use_real or rotation.is_complex():  # of a network that is not compiled
        return original(x, rotation, use_real, *more)
    return rotate(x, rotation)

"""Wan 2.1 and 2.2: image to video."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from gesso.image_files import fitted
from gesso.models.flow.texts import TextLength
from gesso.models.flow.wan import Wan
from gesso.traces.flow import Conditioning
from gesso.types import Prompt, Size, UserError, Which


class WanI2V(Wan):
    """The input image is the first frame, in one of two forms. Wan 2.1 and 2.2 A14B get it as
    further channels of the latents: 4 of a mask and those of the encoded image followed by empty
    frames; Wan 2.1 also as tokens of CLIP. Wan 2.2 TI2V has it as the first latent frame, which is
    not denoised: x has the other frames, and the timestep of its tokens is 0.
    """

    pipeline = "WanImageToVideoPipeline"
    also_loads = ("WanPipeline",)  # the folder of Wan 2.2 TI2V
    input_images = range(1, 2)
    lora_targets = (*Wan.lora_targets, "attn2.add_k_proj", "attn2.add_v_proj")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if not self.pinned and self.transformer.config.in_channels == self.channels:
            raise UserError(
                f'model.path = "{self.path}" generates videos from text alone; set model.name = '
                '"wan", or use a model for image to video'
            )

    @property
    def pinned(self) -> bool:
        """Whether the first latent frame is the input image."""
        return self.pipe.config.expand_timesteps

    @property
    def text_lengths(self) -> TextLength:
        """Networks with tokens of CLIP assume 512 tokens of text behind them."""
        limits = super().text_lengths
        has_clip = self.transformer.config.image_dim is not None
        return replace(limits, least=limits.most) if has_clip else limits

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        channels, count, *cells = super().latent_shape(height, width, frames)
        if count == 1:
            least = 1 + self.pipe.vae_scale_factor_temporal
            raise UserError(f"{self.path} continues an image, got frames = 1; use at least {least}")
        return channels, count - self.pinned, *cells

    def noise(self, size: Size, generator: torch.Generator) -> Tensor:
        """The pipeline draws noise of the first frame, too, and does not use it."""
        noise = torch.randn(super().latent_shape(*size), generator=generator)
        return noise[:, 1:] if self.pinned else noise

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        cond = super().encode(prompts, size)
        images = [self._first_frame(prompt, size) for prompt in prompts]
        pixels = torch.cat([self.pipe.video_processor.preprocess(image) for image in images])
        source = self._source(pixels.unsqueeze(2).to(self.device, self.pipe.vae.dtype), size)
        if self.transformer.config.image_dim is None:
            return replace(cond, source=source)
        clip = self.pipe.encode_image(images, self.device).to(self.dtype)  # (P, 257, D)
        return replace(cond, source=source, pooled=clip)

    def _first_frame(self, prompt: Prompt, size: Size) -> Image:
        """The largest centred part of the input image with the aspect ratio of the video."""
        try:
            return fitted(prompt.images[0].open(), size.height, size.width)
        except UserError as error:
            raise UserError(f"{prompt.where or 'this prompt'}: {error}") from error

    def _source(self, first: Tensor, size: Size) -> Tensor:
        """first: (P, 3, 1, height, width) → (P, C, 1, H, W), or mask and channels (P, 4 + C, F, H,
        W)."""
        if self.pinned:
            return self.latents(first)
        empty = first.new_zeros(*first.shape[:2], size.frames - 1, *first.shape[3:])
        z = self.latents(torch.cat([first, empty], 2))
        mask = z.new_zeros(len(z), self.pipe.vae_scale_factor_temporal, *z.shape[2:])
        mask[:, :, 0] = 1
        return torch.cat([mask, z], 1)

    def blank(self, rows: int, size: Size) -> Conditioning:
        cond = self.blank_texts(rows)
        _, frames, *cells = super().latent_shape(*size)
        shape = (
            (self.channels, 1)
            if self.pinned
            else (self.transformer.config.in_channels - self.channels, frames)
        )
        source = torch.empty(rows, *shape, *cells, device=self.device)
        if self.transformer.config.image_dim is None:
            return replace(cond, source=source)
        tower = self.pipe.image_encoder.config
        tokens = 1 + (tower.image_size // tower.patch_size) ** 2
        clip = torch.empty(rows, tokens, tower.hidden_size, dtype=self.dtype, device=self.device)
        return replace(cond, source=source, pooled=clip)

    def velocity(
        self, x: Tensor, sigma: Tensor, cond: Conditioning, weights: Which = "current"
    ) -> Tensor:
        v = super().velocity(x, sigma, cond, weights)
        return v[:, :, 1:] if self.pinned else v

    def inputs(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> dict[str, Any]:
        assert cond.source is not None
        if not self.pinned:
            more = {} if cond.pooled is None else {"encoder_hidden_states_image": cond.pooled}
            return super().inputs(torch.cat([x, cond.source], 1), sigma, cond) | more
        video = self.completed(x, cond)
        cells = video[0, 0, 0].numel() // self.patch**2  # tokens of a frame
        time = self.timestep(sigma)[:, None].repeat(1, video.shape[2] * cells)
        time[:, :cells] = 0
        return super().inputs(video, sigma, cond) | {"timestep": time}

    def encode_images(self, images: Tensor) -> Tensor:
        """Latents of videos; without the first frame where it is the input image."""
        z = super().encode_images(images)
        return z[:, :, 1:] if self.pinned else z

    def completed(self, latents: Tensor, cond: Conditioning) -> Tensor:
        if not self.pinned:
            return latents
        assert cond.source is not None
        return torch.cat([cond.source.to(latents.dtype), latents], 2)

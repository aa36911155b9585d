"""Wan 2.1 and 2.2: text to video."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gesso.models.adapter_checks import AdapterFile
from gesso.models.flow.base import TextEncoder
from gesso.models.flow.experts import Experts
from gesso.models.flow.loading import NETWORKS
from gesso.models.flow.multistep import MultistepModel
from gesso.models.flow.texts import TextLength, text_encoder
from gesso.quiet import quiet
from gesso.traces.flow import Conditioning
from gesso.types import Prompt, Size, UserError, Which

PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")


ADAPTERS = {
    "transformer": "pytorch_lora_weights.safetensors",
    "transformer_2": "pytorch_lora_weights_2.safetensors",
}
"""Files of the LoRA of each expert."""


class Wan(MultistepModel):
    """UMT5 encodes the text; latents are (C, F, H, W), F = 1 + (frames − 1) / 4. A video of one
    frame is an image."""

    pipeline = "WanPipeline"
    large = (*NETWORKS, "text_encoder")
    blocks = ("WanTransformerBlock",)
    cross_attention = True
    # Flow-Factory's list (there with rank 64, alpha 128): self-attention, cross-attention to the
    # text, feed-forward layers.
    lora_targets = (
        *(f"{layer}.{name}" for layer in ("attn1", "attn2") for name in PROJECTIONS),
        "ffn.net.0.proj",
        "ffn.net.2",
    )

    def trained_network(self) -> Any:
        """The transformer; for Wan 2.2 A14B, both experts."""
        if self.pipe.config.boundary_ratio is None:
            return self.transformer
        scale = self.pipe.scheduler.config.num_train_timesteps
        second = self.pipe.transformer_2
        return Experts(self.transformer, second, self.pipe.config.boundary_ratio * scale)

    def save_adapter(
        self, folder: Path, layers: Mapping[str, Tensor], metadata: Mapping[str, object]
    ) -> None:
        """A file for each expert: diffusers loads the second with `load_into_transformer_2`."""
        if not isinstance(self.network, Experts):
            return super().save_adapter(folder, layers, metadata)
        for name, file in ADAPTERS.items():
            own = {
                key.removeprefix(f"{name}."): tensor
                for key, tensor in layers.items()
                if key.startswith(f"{name}.")
            }
            self.pipe.save_lora_weights(
                folder,
                transformer_lora_layers=own,
                transformer_lora_adapter_metadata=metadata,
                weight_name=file,
            )

    def read_adapter(self, path: str, key: str) -> AdapterFile:
        if not isinstance(self.network, Experts):
            return super().read_adapter(path, key)
        files = {
            name: super(Wan, self).read_adapter(str(Path(path) / file), key)
            for name, file in ADAPTERS.items()
        }
        tensors = {f"{n}.{key}": t for n, file in files.items() for key, t in file.tensors.items()}
        first = files["transformer"]
        return AdapterFile(first.file, tensors, first.settings)

    @property
    def cell(self) -> int:
        return self.pipe.vae_scale_factor_spatial

    @property
    def channels(self) -> int:
        return self.pipe.vae.config.z_dim

    @property
    def text_width(self) -> int:
        return self.transformer.config.text_dim

    @property
    def text_lengths(self) -> TextLength:
        return TextLength(default=512, least=1, most=512)

    @property
    def text_encoders(self) -> list[TextEncoder]:
        return [text_encoder("UMT5", self.text_length, self.pipe.tokenizer)]

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        step = self.pipe.vae_scale_factor_temporal
        if (frames - 1) % step:
            raise UserError(
                f"{self.path} does not support videos of {frames} frames: their number must be one "
                f"more than a multiple of {step}; use {round((frames - 1) / step) * step + 1}"
            )
        return self.channels, 1 + (frames - 1) // step, *self.cells(height, width)

    @quiet("diffusers")
    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        from diffusers import WanPipeline

        # The same method of the image-to-video pipeline needs the package ftfy.
        embeds = WanPipeline._get_t5_prompt_embeds(
            self.pipe,
            [p.text for p in prompts],
            max_sequence_length=self.text_length,
            device=self.device,
        )
        return Conditioning(embeds.to(self.dtype))

    def velocity(
        self, x: Tensor, sigma: Tensor, cond: Conditioning, weights: Which = "current"
    ) -> Tensor:
        if not isinstance(self.network, Experts):
            return self._velocity(x, sigma, cond, weights)
        parts = self.network.rows(self.timestep(sigma))
        if len(parts) == 1:
            return self._velocity(x, sigma, cond, weights, second=next(iter(parts)))
        found = [
            self._velocity(x[index], sigma[index], cond.rows(index), weights, second=second)
            for second, index in parts.items()
        ]
        return torch.cat(found)[torch.cat([*parts.values()]).argsort()]

    def _velocity(
        self, x: Tensor, sigma: Tensor, cond: Conditioning, weights: Which, **expert: bool
    ) -> Tensor:
        """The velocity of rows that use the same expert."""
        rows = len(x)
        x, sigma, cond = self.fill(x, sigma, cond)
        return self.run(weights, **expert, **self.inputs(x, sigma, cond))[:rows].float()

    def guide(
        self, negative: Tensor, positive: Tensor, scale: float | Tensor, sigma: Tensor
    ) -> Tensor:
        """Each expert may have its own scale."""
        if self.guidance_2 is not None:
            second = self.timestep(sigma) < self.network.boundary
            scale = torch.where(second, self.guidance_2, scale).view(-1, 1, 1, 1, 1)
        return super().guide(negative, positive, scale, sigma)

    def inputs(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> dict[str, Any]:
        """Inputs of the transformer."""
        return {
            "hidden_states": x.to(self.dtype),
            "timestep": self.timestep(sigma),
            "encoder_hidden_states": cond.embeds,
        }

    def pixels(self, latents: Tensor) -> Tensor:
        """(N, C, F, H, W) → (N, 3, frames, height, width), or (N, 3, height, width) of one frame.
        One video after the other: the decoder's activations are large."""
        vae = self.pipe.vae
        mean, std = self._statistics(latents)
        z = (latents * std + mean).to(vae.dtype)
        videos = torch.cat([vae.decode(each, return_dict=False)[0] for each in z.split(1)])
        return videos[:, :, 0] if videos.shape[2] == 1 else videos

    def latents(self, pixels: Tensor) -> Tensor:
        """The inverse."""
        videos = pixels if pixels.ndim == 5 else pixels.unsqueeze(2)
        z = torch.cat([self.pipe.vae.encode(v).latent_dist.mode() for v in videos.split(1)])
        mean, std = self._statistics(z.float())
        return (z.float() - mean) / std

    def _statistics(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and std of the latents, per channel."""
        settings = self.pipe.vae.config
        mean, std = (
            latents.new_tensor(values).view(-1, 1, 1, 1)
            for values in (settings.latents_mean, settings.latents_std)
        )
        return mean, std

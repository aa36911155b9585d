"""Stable Diffusion 3 and 3.5, through the components of diffusers' own pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gesso import config
from gesso.models.policy import Policy
from gesso.types import Conditioning, UserError, Which

LORA_TARGETS = [
    f"attn.{name}"  # bare names would also hit attn2
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
]


class SD3:
    """`velocity` is the transformer, `encode` and `decode` are the pipeline's own."""

    def __init__(self, settings: config.Model, seed: int = 0) -> None:
        self.device = pick_device(settings.device)
        self.dtype = getattr(torch, settings.dtype)
        self.text_length = settings.text_length
        self.pipe = _load_pipeline(settings.path, self.dtype).to(self.device)
        for part in (self.pipe.text_encoder, self.pipe.text_encoder_2, self.pipe.text_encoder_3):
            if part is not None:
                part.requires_grad_(False)
        self.pipe.vae.requires_grad_(False)
        self.policy = Policy(self.pipe.transformer, settings.lora, LORA_TARGETS, seed)

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> Conditioning:
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            prompt=list(texts),
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            device=self.device,
            max_sequence_length=self.text_length,
        )
        return Conditioning(embeds, pooled)

    def sigmas(self, steps: int) -> Tensor:
        scheduler = self.pipe.scheduler
        scheduler.set_timesteps(steps, device="cpu")
        return scheduler.sigmas.float()

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        factor = self.pipe.vae_scale_factor * self.pipe.patch_size
        if height % factor or width % factor:
            fit = f"{_round(height, factor)}×{_round(width, factor)}"
            raise UserError(
                f"pictures of {height}×{width} do not fit {self.pipe.config._name_or_path}: "
                f"height and width must be multiples of {factor}; use {fit}"
            )
        scale = self.pipe.vae_scale_factor
        return self.pipe.transformer.config.in_channels, height // scale, width // scale

    def velocity(
        self, x: Tensor, sigma: Tensor, cond: Conditioning, weights: Which = "current"
    ) -> Tensor:
        with self.policy.using(weights):
            return self.pipe.transformer(
                hidden_states=x.to(self.dtype),
                timestep=sigma * self.pipe.scheduler.config.num_train_timesteps,
                encoder_hidden_states=cond.embeds,
                pooled_projections=cond.pooled,
                return_dict=False,
            )[0].float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        vae = self.pipe.vae
        z = latents / vae.config.scaling_factor + vae.config.shift_factor
        pixels = vae.decode(z.to(vae.dtype), return_dict=False)[0].float()
        unit = (pixels / 2 + 0.5).clamp(0, 1)
        return (unit * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()

    def save(self, folder: Path) -> None:
        with _quiet():
            if self.policy.lora is None:
                self.pipe.save_pretrained(folder)
                return
            layers, metadata = self.policy.lora_state()
            self.pipe.save_lora_weights(
                folder,
                transformer_lora_layers=layers,
                transformer_lora_adapter_metadata=metadata,  # without it diffusers forgets alpha
            )


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f'model.device = "{name}" cannot be used here: {reason}') from error
    return device


def _round(size: int, factor: int) -> int:
    return max(factor, round(size / factor) * factor)


def _load_pipeline(path: str, dtype: torch.dtype) -> Any:
    folder = config.resolve_path(path)
    is_hub_name = path.count("/") == 1 and not folder.parent.is_dir()
    looks_local = path.startswith((config.ZOO, ".", "/", "~")) or not is_hub_name
    if looks_local and not (Path(folder) / "model_index.json").is_file():
        raise UserError(
            f'model.path = "{path}": expected a diffusers pipeline folder with model_index.json, '
            f"found {'a folder without one' if folder.is_dir() else 'no such folder'}"
        )
    source = str(folder) if looks_local else path
    absent = _absent_parts(folder) if looks_local else {}
    try:
        with _quiet():
            from diffusers import StableDiffusion3Pipeline

            return StableDiffusion3Pipeline.from_pretrained(source, dtype=dtype, **absent)
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f'model.path = "{path}": diffusers cannot load it as a StableDiffusion3Pipeline: '
            f"{str(error).splitlines()[0]}"
        ) from error


def _absent_parts(folder: Path) -> dict[str, None]:
    """Parts the folder's index leaves out (T5, usually): diffusers wants to be told so again."""
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    return {name: None for name, value in index.items() if value == [None, None]}


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no talk of torchvision while a pipeline loads; errors still show."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries = (diffusers_logging, transformers_logging)
    levels = [library.get_verbosity() for library in libraries]
    for library in libraries:
        library.set_verbosity_error()
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library, level in zip(libraries, levels, strict=True):
            library.set_verbosity(level)
            library.enable_progress_bar()

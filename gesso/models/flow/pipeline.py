"""A diffusers pipeline as a flow model: loading, precision, latents, decoding and saving, once for
all of them. A model's own file says what differs: how it encodes text and calls its transformer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gesso import config
from gesso.models.flow.adapter import load_adapter
from gesso.models.flow.base import Guidance
from gesso.models.policy import Policy
from gesso.types import UserError

JOINT_ATTENTION = tuple(
    f"attn.{name}"  # bare names would also hit attn2 of SD3.5
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
"""Projections of an attention over picture and text at once, as diffusers names them."""


@dataclass(frozen=True)
class TextLength:
    """Tokens of a prompt: how many a model takes unless told otherwise, and between what bounds."""

    default: int
    least: int
    most: int


class PipelineModel:
    """What the models of this folder have in common; everything is the pipeline's own."""

    pipeline: ClassVar[str]  # name of the class in diffusers
    lora_targets: ClassVar[Sequence[str]]
    patch: ClassVar[int] = 2  # latent cells a token, in height and in width
    packed: ClassVar[bool] = False  # the transformer wants tokens, it does not make them itself
    even_sigmas: ClassVar[bool] = False  # the pipeline gives the scheduler 1, …, 1/steps

    def __init__(self, settings: config.Model, seed: int = 0) -> None:
        self.device = pick_device(settings.device)
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        whole = settings.lora is None
        self.pipe = load_pipeline(self.pipeline, settings, self.dtype).to(self.device)
        for part in self.pipe.components.values():
            if isinstance(part, torch.nn.Module):
                part.requires_grad_(False).eval()
        self.transformer = self.pipe.transformer
        self.text_length = self._text_length(settings.text_length)
        if settings.gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        self.policy = Policy(self.transformer, settings.lora, self.lora_targets, seed)
        if settings.lora is not None and settings.lora.path is not None:
            with quiet():
                load_adapter(self.pipe, self.policy, settings.lora.path)
        self._autocast = whole and self.dtype != torch.float32

    @property
    def text_lengths(self) -> TextLength:
        raise NotImplementedError

    def _text_length(self, asked: int | None) -> int:
        own = self.text_lengths
        if asked is None:
            return own.default
        if not own.least <= asked <= own.most:
            raise UserError(
                f"model.text_length = {asked}, but {self.pipe.config._name_or_path} takes "
                f"{own.least} to {own.most} tokens; leave it out for its own {own.default}"
            )
        return asked

    @property
    def guidance(self) -> Guidance:
        return "negative"

    @property
    def limit(self) -> int:
        return self.text_length

    def tokens(self, text: str) -> int:
        return count_tokens(self.pipe.tokenizer, text)

    def guide(self, negative: Tensor, positive: Tensor, scale: float) -> Tensor:
        """v = u + scale·(c − u)."""
        return negative + scale * (positive - negative)

    def precision(self) -> AbstractContextManager:
        """Float32 weights that are trained whole run in half precision by autocast; LoRA leaves
        the frozen weights in the half precision they were loaded in."""
        if not self._autocast:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        """The pipeline's own schedule; a dynamic shift grows with the number of picture tokens."""
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        scheduler, own = self.pipe.scheduler, self.pipe.scheduler.config
        asked: dict[str, Any] = {"num_inference_steps": steps}
        if self.even_sigmas:
            asked = {"sigmas": np.linspace(1.0, 1 / steps, steps)}
        if own.use_dynamic_shifting:
            _, h, w = self.latent_shape(height, width)
            asked["mu"] = calculate_shift(
                h * w // self.patch**2,
                own.base_image_seq_len,
                own.max_image_seq_len,
                own.base_shift,
                own.max_shift,
            )
        scheduler.set_timesteps(**asked, device="cpu")
        return scheduler.sigmas.float()

    def timestep(self, sigma: Tensor) -> Tensor:
        """σ times 1000, rounded to the network's precision as FLUX's and Qwen's pipelines do."""
        return (sigma * self.pipe.scheduler.config.num_train_timesteps).to(self.dtype)

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        scale = self.pipe.vae_scale_factor
        factor = scale * self.patch
        if height % factor or width % factor:
            fit = f"{_round(height, factor)}×{_round(width, factor)}"
            raise UserError(
                f"pictures of {height}×{width} do not fit {self.pipe.config._name_or_path}: "
                f"height and width must be multiples of {factor}; use {fit}"
            )
        return self.channels, height // scale, width // scale

    @property
    def channels(self) -> int:
        """Of the latents, before they are packed into tokens."""
        return self.transformer.config.in_channels // (self.patch**2 if self.packed else 1)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        pixels = self.pixels(latents).float()
        unit = (pixels / 2 + 0.5).clamp(0, 1)
        return (unit * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()

    def pixels(self, latents: Tensor) -> Tensor:
        """(N, C, H, W) → (N, 3, height, width) in [−1, 1]."""
        vae = self.pipe.vae
        z = latents / vae.config.scaling_factor + vae.config.shift_factor
        return vae.decode(z.to(vae.dtype), return_dict=False)[0]

    def save(self, folder: Path, merged: bool = False) -> None:
        """LoRA weights as diffusers' `load_lora_weights` reads them; or, of a full fine-tune or
        with `merged`, the whole pipeline with the adapter folded into its weights."""
        with quiet():
            if self.policy.lora is None:
                self.pipe.save_pretrained(folder)
            elif merged:
                with self.policy.merged():
                    self.pipe.save_pretrained(folder)
            else:
                layers, metadata = self.policy.lora_state()
                self.pipe.save_lora_weights(
                    folder,
                    transformer_lora_layers=layers,
                    transformer_lora_adapter_metadata=metadata,  # else diffusers forgets alpha
                )


def count_tokens(tokenizer: Any, text: str) -> int:
    """With the special tokens, and without the tokenizer's own remark about long texts."""
    with quiet():
        return len(tokenizer(text, truncation=False).input_ids)


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


def load_pipeline(kind: str, settings: config.Model, dtype: torch.dtype) -> Any:
    """The pipeline with its networks in `dtype`; a transformer that is trained whole in float32."""
    path = settings.path
    source, absent = locate(path)
    dtypes = {"transformer": torch.float32 if settings.lora is None else dtype, "default": dtype}
    try:
        with quiet():
            import diffusers

            return getattr(diffusers, kind).from_pretrained(source, dtype=dtypes, **absent)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(
            f'model.path = "{path}": diffusers cannot load it as a {kind}: '
            f"{str(error).splitlines()[0]}"
        ) from error


def locate(path: str) -> tuple[str, dict[str, None]]:
    """What diffusers is to load: a checked folder or a hub name, and the parts it is to go
    without."""
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
    return source, absent


def _absent_parts(folder: Path) -> dict[str, None]:
    """Parts the folder's index leaves out (T5, usually): diffusers wants to be told so again."""
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    return {name: None for name, value in index.items() if value == [None, None]}


@contextmanager
def quiet() -> Iterator[None]:
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

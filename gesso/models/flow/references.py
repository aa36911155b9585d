"""Input images of a prompt as tokens of the network: references, which are not denoised.

A network receives [target; references] and returns a velocity for each token; those of the
references are dropped. References are encoded once per prompt, by the mean of the autoencoder's
posterior.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from PIL.Image import Image
from torch import Tensor

from gesso.data.prompts import ImageSizes
from gesso.traces.flow import Conditioning, Layout, source_tokens
from gesso.types import Prompt, PromptImage, UserError

MAX_RATIO = 16
"""Of the sides of an input image: a longer one loses most of its content when it is resized."""


class ReferenceEncoder(Protocol):
    """What a model with input images has."""

    pipe: Any
    device: torch.device
    dtype: torch.dtype

    def latents(self, pixels: Tensor) -> Tensor: ...

    def tokens(self, latents: Tensor) -> Tensor:
        """(N, C, H, W) → (N, R, D)."""

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Tokens in height and width of an image of this size."""

    def reference_size(self, height: int, width: int) -> tuple[int, int]:
        """The size at which an input image of this height and width is encoded."""

    def reference(self, image: Image) -> Tensor:
        """(1, 3, height, width) in [−1, 1]: the pixels that are encoded."""


def with_references(
    model: ReferenceEncoder, cond: Conditioning, prompts: Sequence[Prompt]
) -> Conditioning:
    """The conditioning of these prompts with their input images."""
    rows = []
    for i, prompt in enumerate(prompts):
        references = [_pixels(model, image, prompt.where) for image in prompt.images]
        layout = tuple(model.grid(*pixels.shape[-2:]) for pixels in references)
        encoded = [model.tokens(model.latents(pixels)) for pixels in references]
        source = torch.cat(encoded, 1) if encoded else _empty(model, 1, ())
        row = cond.rows(torch.tensor([i], device=cond.embeds.device))
        rows.append(replace(row, source=source.to(model.dtype), layouts=(layout,)))
    return Conditioning.stack(rows)


def with_blank_references(
    model: ReferenceEncoder, cond: Conditioning, images: ImageSizes
) -> Conditioning:
    """Uninitialised references of input images of these heights and widths."""
    layout = tuple(model.grid(*model.reference_size(*size)) for size in images)
    rows = len(cond.embeds)
    return replace(cond, source=_empty(model, rows, layout), layouts=(layout,) * rows)


def target_and_references(target: Tensor, cond: Conditioning) -> Tensor:
    """(N, T, D) → (N, T + R, D): the input of the network."""
    return target if cond.source is None else torch.cat([target, cond.source.to(target.dtype)], 1)


def wrong_ratio(height: int, width: int, most: int = MAX_RATIO) -> str | None:
    """What the aspect ratio of an input image should be instead, or None."""
    if max(height, width) <= most * min(height, width):
        return None
    return f"an aspect ratio of at most {most}:1"


def at_area(height: int, width: int, area: int, multiple: int) -> tuple[int, int]:
    """A size of this aspect ratio and about this area, with sides that are multiples."""
    sides = math.sqrt(area * height / width), math.sqrt(area * width / height)
    tall, wide = (max(1, round(side / multiple)) * multiple for side in sides)
    return tall, wide


def _pixels(model: ReferenceEncoder, image: PromptImage, where: str) -> Tensor:
    try:
        pixels = model.reference(image.open())
    except UserError as error:
        raise UserError(f"{where or 'this prompt'}: {error}") from error
    return pixels.to(model.device, model.pipe.vae.dtype)


def _empty(model: ReferenceEncoder, rows: int, layout: Layout) -> Tensor:
    width = model.pipe.transformer.config.in_channels
    shape = rows, source_tokens(layout), width
    return torch.empty(shape, dtype=model.dtype, device=model.device)

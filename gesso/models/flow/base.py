"""The protocol of flow models, and code that all of them share.

A new diffusers pipeline is added as one class that implements this protocol; it contains no
denoising loop and no log-probs. `pipeline.py` implements most of the protocol for any diffusers
pipeline.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from gesso.traces.flow import Conditioning
from gesso.types import Prompt, Size, UserError, Which
from gesso.weights.merge import SHARD
from gesso.weights.policy import Policy
from gesso.weights.roles import RunnableWeights

Guidance = Literal["negative", "embedded", "none"]
"""How a model supports guidance: by a second pass over the negative prompt, as an input of its
network (distilled models), or not at all."""


@dataclass(frozen=True)
class TextEncoder:
    """A text encoder and its maximum prompt length."""

    name: str
    limit: int  # maximum number of prompt tokens; the rest is truncated
    tokens: Callable[[str], int]  # number of tokens of a text


class FlowModel(Protocol):
    device: torch.device

    @property
    def policy(self) -> RunnableWeights: ...

    @property
    def guidance(self) -> Guidance: ...

    @property
    def text_encoders(self) -> Sequence[TextEncoder]: ...

    @property
    def input_images(self) -> range:
        """Numbers of input images that a prompt may have; `range(1)` for text-to-image models."""

    def wrong_size(self, height: int, width: int) -> str | None:
        """What an input image of this size should be instead, or None."""

    def encode(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        """Texts and input images → (P, …) conditioning of samples of this size, as the pipeline
        itself would encode them."""

    def output_size(self, prompt: Prompt, height: int, width: int) -> tuple[int, int]:
        """Height and width of the samples of a prompt, where the recipe has these."""

    def sigmas(self, steps: int, height: int, width: int, frames: int = 1) -> Tensor:
        """(steps+1,) float32, from 1 down to 0."""

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """(C, H, W) of an image of that size, (C, F, H, W) of a video, or a UserError with the
        supported sizes."""

    def noise(self, size: Size, generator: torch.Generator) -> Tensor:
        """Noise of this size on the CPU: the values that the pipeline draws from the
        generator."""

    def velocity(
        self, x: Tensor, sigma: Tensor, cond: Conditioning, weights: Which = "current"
    ) -> Tensor:
        """x: (N, C, H, W) or (N, C, F, H, W), sigma: (N,), cond: N rows → v like x, float32."""

    def filled(self, rows: int) -> int:
        """Number of rows that the network runs for a batch of `rows`, including padding."""

    def guide(self, negative: Tensor, positive: Tensor, scale: float, sigma: Tensor) -> Tensor:
        """Velocities of the two branches at sigma, (N,) → the guided velocity."""

    def decode(self, latents: Tensor, cond: Conditioning) -> Tensor:
        """Latents → (N, height, width, 3) uint8 on the CPU; of a video
        (N, frames, height, width, 3)."""

    def save(self, folder: Path, merged: bool = False, shard: str = SHARD) -> None:
        """Saves the current weights for diffusers: LoRA weights, or the whole pipeline, in files of
        at most `shard`."""


class ImageEncoder(Protocol):
    """What a flow model must have in addition, to be trained on samples of the data."""

    def encode_images(self, images: Tensor) -> Tensor:
        """(N, height, width, 3) uint8 → (N, C, H, W) float32 clean latents: the inverse of
        `decode`, up to the autoencoder's error. Of videos (N, frames, height, width, 3)."""


class TrainableFlowModel(FlowModel, Protocol):
    """The same for the learner and for loading, which may change the weights."""

    @property
    def policy(self) -> Policy: ...


class PromptCache:
    """Encoded texts and input images, computed once per prompt and cached on the CPU up to `limit`
    bytes.

    Each prompt is encoded alone: in a batch its last bits would depend on the other prompts, and a
    resumed run, which encodes the prompts in another order, would diverge from an uninterrupted
    one.
    """

    def __init__(self, model: FlowModel, limit: int = 2**30) -> None:
        self.model = model
        self.limit = limit
        self.encoded = 0  # prompts that went through the encoders
        self._bytes = 0
        self._rows: OrderedDict[tuple[object, ...], Conditioning] = OrderedDict()

    def conditions(
        self, prompts: Sequence[Prompt], size: Size, guidance: float, negatives: bool = False
    ) -> tuple[Conditioning, Conditioning | None]:
        """(P, …) on the model's device: the prompts, and the negative prompts if needed. As in
        diffusers, guidance of 1 or less is off. `negatives`: encode them anyway."""
        cond = self(prompts, size)
        if self.model.guidance == "embedded":
            scale = torch.full((len(prompts),), guidance, device=self.model.device)
            return replace(cond, guidance=scale), None
        if guidance <= 1 and not negatives:
            return cond, None
        return cond, self([replace(p, text=p.negative, is_negative=True) for p in prompts], size)

    def __call__(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        """(P, …) on the model's device."""
        keys = [_key(prompt, size) for prompt in prompts]
        for key, prompt in zip(keys, prompts, strict=True):
            if key not in self._rows:
                row = self.model.encode([prompt], size).to(torch.device("cpu"))
                self.encoded += 1
                self._rows[key] = row
                self._bytes += row.nbytes
            self._rows.move_to_end(key)
        result = Conditioning.stack([self._rows[key] for key in keys]).to(self.model.device)
        while self._bytes > self.limit and len(self._rows) > 1:
            self._bytes -= self._rows.popitem(last=False)[1].nbytes
        return result


def _key(prompt: Prompt, size: Size) -> tuple[object, ...]:
    """The encoding of a text does not depend on the size of the samples."""
    text, images = (prompt.text, prompt.is_negative), [image.digest() for image in prompt.images]
    return (*text, size, *images) if images else text


def wrong_images(model: FlowModel, prompt: Prompt) -> str | None:
    """Why the model does not accept the input images, or None."""
    return _wrong_count(model, prompt) or wrong_sizes(model, prompt)


def wrong_sizes(model: FlowModel, prompt: Prompt) -> str | None:
    """Why the model does not accept the size of an input image, or None. Reads only headers."""
    for i, image in enumerate(prompt.images, 1):
        height, width = image.size
        if expected := model.wrong_size(height, width):
            number = f"image {i} of {len(prompt.images)}"
            return f"{number} has {width}×{height} pixels; expected {expected}"
    return None


def _wrong_count(model: FlowModel, prompt: Prompt) -> str | None:
    allowed, count = model.input_images, len(prompt.images)
    if count in allowed:
        return None
    if allowed.stop == 1:
        return (
            f"expected no input images, got {count}: this model generates from text alone; remove "
            'the images, or use a model that takes them: for editing, or for videos "wan-i2v"'
        )
    least, most = allowed.start, allowed.stop - 1
    numbers = f"{least}" if least == most else f"{least} to {most}"
    plural = "" if most == 1 else "s"
    return (
        f"expected {numbers} input image{plural}, got {count}; rows have input images as "
        '"image" or "images", and `gesso sample` takes --image FILE'
    )


def check_images(model: FlowModel, prompts: Sequence[Prompt]) -> None:
    """Raises a UserError for input images that the model does not accept."""
    for prompt in prompts:
        if reason := wrong_images(model, prompt):
            raise UserError(f"{prompt.where or 'this prompt'}: {reason}")


def check_guidance(model: FlowModel, guidance: float, prompts: Sequence[Prompt]) -> None:
    """Raises a UserError for guidance or negative prompts that this model would ignore."""
    if model.guidance == "none" and guidance != 1:
        raise UserError(
            "this model does not support guidance (it was distilled without it), got "
            f"guidance = {guidance:g}; set algorithm.guidance and eval.guidance to 1.0"
        )
    negative = next((p for p in prompts if p.negative), None)
    if negative is not None and model.guidance != "negative":
        raise UserError(
            f"{negative.where}: this model does not support negative prompts; "
            "remove negative_prompt from the data"
        )


def unused_negatives(
    model: FlowModel, guidance: float, prompts: Sequence[Prompt], path: str, key: str
) -> list[str]:
    """A warning about negative prompts that are ignored because guidance is 1 or less; `key` is the
    config key of the guidance."""
    negative = [p for p in prompts if p.negative]
    if not negative or guidance > 1 or model.guidance != "negative":
        return []
    return [
        f"{len(negative)} of {len(prompts)} prompts of {path} have a negative prompt, which is "
        f"ignored because {key} = {guidance:g}; negative prompts require guidance above 1; the "
        f"first is {negative[0].where}"
    ]


def over_long(model: FlowModel, prompts: Sequence[Prompt], path: str) -> list[str]:
    """Warnings about prompts and negative prompts that a text encoder truncates."""
    warnings = []
    for encoder in model.text_encoders:
        counted = [(p, max(encoder.tokens(p.text), encoder.tokens(p.negative))) for p in prompts]
        long = [(p, tokens) for p, tokens in counted if tokens > encoder.limit]
        if long:
            first, tokens = long[0]
            warnings.append(
                f"{len(long)} of {len(prompts)} prompts of {path} exceed the limit of "
                f"{encoder.limit} tokens of {encoder.name} and are truncated; the first is "
                f"{first.where} with {tokens} tokens: {first.text[:60]}"
            )
    return warnings

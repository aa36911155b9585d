"""Unchanged: is the rest of an edited image what it was?

Each place of the image (a pixel, or a patch of a network) has a distance between source and result.
With a mask, the distances of places outside it are averaged. Without one nobody knows where the
edit is: the `kept` share of all places with the smallest distances is averaged. An edit of at most
1 − kept of the image then costs nothing, wherever it is and whatever it shows, and a change of the
whole image costs as much as with a mask.

pixels     distance: mean |difference| of the channels in [0, 1]; value = exp(−distance / scale)
network    similarity: cosine of the patch features of both images; value = its mean, at least 0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from gesso.config import Strict, pick_device
from gesso.rewards import edits
from gesso.rewards.each import score_each
from gesso.rewards.image import networks
from gesso.types import Prompt, Sample, Score, UserError

if TYPE_CHECKING:
    from torch import Tensor


class Unchanged(Strict):
    """How far an edit leaves the rest of the source image as it was: outside the row's `mask` or,
    without one, in the `kept` share of the image that changed least. Range [0, 1].
    `unchanged/pixels`: exp(−mean absolute difference / scale), also the value without a `path`.
    `unchanged/features`: with a `path`, the mean cosine of patch features, which is the value."""

    path: str = ""
    """Folder or hub name of a CLIP or DINOv2 network, as in "facebook/dinov2-base"; "" compares
    pixels only."""
    scale: float = Field(0.1, gt=0)
    """Mean difference of channels, in [0, 1], at which the value of pixels is 1/e."""
    kept: float = Field(0.5, gt=0, le=1)
    """Without a mask: share of the image that an edit should leave unchanged."""
    device: str = "auto"
    """Device of the network; "auto" selects CUDA when available."""

    def unfit(self, prompt: Prompt) -> str | None:
        return edits.no_source(prompt) or edits.wrong_mask(prompt)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return score_each(samples, self._score)

    def _score(self, sample: Sample) -> Score:
        source, weights = edits.source(sample), edits.outside(sample)
        difference = np.abs(source.astype(np.float64) - sample.pixels).mean(-1) / 255  # (h, w)
        parts = {"pixels": math.exp(-self._mean(difference, weights) / self.scale)}
        if self.path:
            network = load_patches(self.path, self.device)
            similarity = network.similarity(source, sample.pixels)  # (rows, columns)
            weights = None if weights is None else pooled(weights, similarity.shape)
            parts["features"] = max(0.0, 1 - self._mean(1 - similarity, weights))
        return Score(parts.get("features", parts["pixels"]), parts)

    def _mean(self, distance: np.ndarray, weights: np.ndarray | None) -> float:
        """Over the places outside the mask or, without one, over those that changed least."""
        if weights is not None:
            return float((distance * weights).sum() / weights.sum())
        count = max(1, round(self.kept * distance.size))
        return float(np.sort(distance, axis=None)[:count].mean())


def pooled(weights: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """(rows, columns): the mean of the pixels of each patch."""
    from PIL import Image

    rows, columns = shape
    image = Image.fromarray(weights.astype(np.float32))
    return np.asarray(image.resize((columns, rows), Image.Resampling.BOX))


class Patches:
    """Patch features of a vision transformer. Images are resized to its size without cropping, so
    that a patch is the same place in every image."""

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model, processor

    def similarity(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """(rows, columns): the cosine of both images at each patch."""
        import torch

        with torch.inference_mode():
            features = self._features([one, other])  # (2, patches, D)
            cosines = torch.nn.functional.cosine_similarity(features[0], features[1], dim=-1)
        side = math.isqrt(len(cosines))
        return cosines.double().cpu().numpy().reshape(side, side)

    def _features(self, images: Sequence[np.ndarray]) -> Tensor:
        config = self.model.config
        pixels = self.processor(
            images=networks.to_pil(images),
            size={"height": config.image_size, "width": config.image_size},
            do_center_crop=False,
            return_tensors="pt",
        )["pixel_values"]
        states = self.model(pixel_values=pixels.to(self.model.device)).last_hidden_state
        patches = (config.image_size // config.patch_size) ** 2
        return states[:, -patches:]  # class and register tokens come first


@networks.once
def load_patches(path: str, device: str) -> Patches:
    from transformers import AutoConfig, CLIPImageProcessorPil, CLIPVisionModel, Dinov2Model

    kinds = {"clip": CLIPVisionModel, "clip_vision_model": CLIPVisionModel, "dinov2": Dinov2Model}
    config = networks.load_pretrained(AutoConfig, path)
    if config.model_type not in kinds:
        raise UserError(
            f'"{path}" is a {config.model_type} network; expected CLIP or DINOv2, or path = ""'
        )
    model = networks.load_network(kinds[config.model_type], path).to(pick_device(device))
    return Patches(model, networks.load_pretrained(CLIPImageProcessorPil, path))

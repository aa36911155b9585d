"""CLIP models of transformers as image and text encoders.

Shape legend: N images or texts · D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gesso.config import pick_device
from gesso.rewards.image import networks
from gesso.rewards.image.preprocessing import clip_inputs

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class ClipEncoder:
    model: Any  # CLIPModel
    tokenizer: Any
    processor: Any
    device: torch.device

    def images(self, images: Sequence[np.ndarray]) -> Tensor:
        """(N, D), normalised; images are (height, width, 3) uint8."""
        import torch

        pixels = self.processor(images=networks.to_pil(images), return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            return self._encoded(pixels)

    def differentiable_images(self, images: Tensor) -> Tensor:
        """The same with gradient; images are (N, 3, height, width) in [0, 1]."""
        return self._encoded(clip_inputs(images, self.processor))

    def _encoded(self, pixels: Tensor) -> Tensor:
        from torch.nn.functional import normalize

        features = self.model.get_image_features(pixel_values=pixels.to(self.device))
        return normalize(features.pooler_output, dim=-1)

    def texts(self, texts: Sequence[str]) -> Tensor:
        """(N, D), normalised; texts are truncated to the model's positions (77 tokens)."""
        import torch

        length = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt"
        ).to(self.device)
        with torch.inference_mode():
            features = self.model.get_text_features(
                input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
            )
        return torch.nn.functional.normalize(features.pooler_output, dim=-1)

    def cosines(self, texts: Sequence[str], images: Sequence[np.ndarray]) -> Tensor:
        """(N,): the cosine of each text with its image."""
        return (self._of_each(texts) * self.images(images)).sum(-1)

    def differentiable_cosines(self, texts: Sequence[str], images: Tensor) -> Tensor:
        """The same with gradient; images are (N, 3, height, width) in [0, 1]."""
        return (self._of_each(texts) * self.differentiable_images(images)).sum(-1)

    def _of_each(self, texts: Sequence[str]) -> Tensor:
        unique = list(dict.fromkeys(texts))  # a group shares its prompt
        row = [unique.index(text) for text in texts]
        return self.texts(unique)[row]


@networks.once
def load_clip(path: str, processor: str, device: str) -> ClipEncoder:
    """Loads the model from `path`, tokenizer and image processor from `processor`."""
    from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

    target = pick_device(device)
    return ClipEncoder(
        networks.load_network(CLIPModel, path).to(target),
        networks.load_pretrained(AutoTokenizer, processor),
        networks.load_pretrained(CLIPImageProcessorPil, processor),
        target,
    )

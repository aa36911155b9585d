"""Qwen-Image-Edit (Plus, 2509 and 2511): edits one to three images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gesso import config
from gesso.models.flow import loading
from gesso.models.flow.base import TextEncoder
from gesso.models.flow.editing import EditingModel
from gesso.models.flow.qwen_image import QwenImage
from gesso.models.flow.references import at_area, with_references
from gesso.models.flow.texts import TextLength
from gesso.traces.flow import Conditioning
from gesso.types import Prompt, Size, UserError
from gesso.weights.merge import SHARD

SEEN_AREA = 384**2  # px: of an image for Qwen2.5-VL
MULTIPLE = 32  # px: sides of the images for both encoders
PICTURE = "Picture {}: <|vision_start|>{}<|vision_end|>"
PAD = "<|image_pad|>"  # one per feature of an image


class QwenEdit(EditingModel, QwenImage):
    """Qwen2.5-VL reads the images and the text of a prompt, and of a negative prompt; the network
    also receives the images as further tokens. Prompts are never truncated."""

    pipeline = "QwenImageEditPlusPipeline"
    input_images = range(1, 4)
    replaced = ("processor",)  # Qwen2VLProcessor requires torchvision, for videos

    def __init__(self, settings: config.Model, *args: Any, **kwargs: Any) -> None:
        super().__init__(settings, *args, **kwargs)
        self.settings = settings
        self.images_for_text = loading.image_processor(settings, "processor")

    @property
    def text_lengths(self) -> TextLength:
        """The length, images included, to which compiled blocks pad shorter prompts."""
        return TextLength(default=512, least=1, most=self.pipe.tokenizer_max_length)

    @property
    def text_encoders(self) -> list[TextEncoder]:
        return []

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        rows = []
        for prompt in prompts:
            embeds = self._embeds(prompt)
            mask = torch.ones(embeds.shape[:2], dtype=torch.bool, device=self.device)
            rows.append(with_references(self, Conditioning(embeds, mask=mask), [prompt]))
        return Conditioning.stack(rows)

    def _embeds(self, prompt: Prompt) -> Tensor:
        """(1, L, D): the last hidden state without the head of the template. Unlike the pipeline
        (diffusers 0.42) it passes mm_token_type_ids: without them transformers 5 gives the features
        of an image the positions of a text."""
        if PAD in prompt.text:
            raise UserError(f"{prompt.where}: expected a prompt without {PAD}, got {prompt.text!r}")
        seen = [image.open() for image in prompt.images]
        sizes = [at_area(image.height, image.width, SEEN_AREA, MULTIPLE) for image in seen]
        resize = self.pipe.image_processor.resize
        seen = [resize(image, *size) for image, size in zip(seen, sizes, strict=True)]
        pixels = self.images_for_text(seen, return_tensors="pt").to(self.device)
        counts = pixels["image_grid_thw"].prod(1) // self.images_for_text.merge_size**2
        pictures = [PICTURE.format(k, PAD * n) for k, n in enumerate(counts.tolist(), 1)]
        text = self.pipe.prompt_template_encode.format("".join(pictures) + prompt.text)
        ids = self.pipe.tokenizer(text, return_tensors="pt").input_ids.to(self.device)
        encoder = self.pipe.text_encoder
        hidden = encoder(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == encoder.config.image_token_id).int(),
            output_hidden_states=True,
            **pixels,
        ).hidden_states[-1]
        return hidden[:, self.pipe.prompt_template_encode_start_idx :].to(self.dtype)

    @property
    def text_tokens(self) -> int:
        """Images are part of a prompt. Longer prompts are padded to a multiple of the length."""
        processor = self.images_for_text
        seen = (at_area(h, w, SEEN_AREA, MULTIPLE) for h, w in self.blank_images)
        patches = sum(processor.get_number_of_image_patches(*size) for size in seen)
        return (patches // processor.merge_size**2 // self.text_length + 1) * self.text_length

    def reference_size(self, height: int, width: int) -> tuple[int, int]:
        """The ratio of the image at the area of an output image; for outputs of 1024² the size of
        the pipeline."""
        return at_area(height, width, self.area, MULTIPLE)

    def save(self, folder: Path, merged: bool = False, shard: str = SHARD) -> None:
        super().save(folder, merged, shard)
        loading.save_replaced(self, self.settings, folder)

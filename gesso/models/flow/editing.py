"""Pipelines whose network receives input images as further tokens."""

from __future__ import annotations

import math
from functools import cached_property

from PIL.Image import Image
from torch import Tensor

from gesso.data.prompts import ImageSizes
from gesso.models.flow.packing import pack
from gesso.models.flow.pipeline import PipelineModel
from gesso.models.flow.references import at_area, with_blank_references
from gesso.traces.flow import Conditioning
from gesso.types import Prompt, Size


class EditingModel(PipelineModel):
    """Comes first among the base classes: `blank` adds references to that of the others."""

    @cached_property
    def blank_images(self) -> ImageSizes:
        """Height and width of the input images of `blank`: as few as a prompt must have, of the
        size of an output image, unless others are set."""
        side = math.isqrt(self.area)
        return [(side, side)] * self.input_images.start

    def blank(self, rows: int, size: Size) -> Conditioning:
        return with_blank_references(self, super().blank(rows, size), self.blank_images)

    def tokens(self, latents: Tensor) -> Tensor:
        """(N, C, H, W) → (N, R, D): of reference images."""
        return pack(latents)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Tokens in height and width of an image of this size."""
        h, w = self.latent_shape(height, width)[-2:]
        return h // self.patch, w // self.patch

    def reference_size(self, height: int, width: int) -> tuple[int, int]:
        """The size at which an input image of this height and width is encoded."""
        return at_area(height, width, self.area, self.cell * self.patch)

    def reference(self, image: Image) -> Tensor:
        """(1, 3, height, width) in [−1, 1]: an input image, resized as in diffusers' pipelines."""
        size = self.reference_size(image.height, image.width)
        return self.pipe.image_processor.preprocess(image, *size)

    def token_count(self, prompt: Prompt, height: int, width: int) -> int:
        """Tokens of a sample of this prompt with its references. Reads only headers."""
        references = (self.reference_size(*image.size) for image in prompt.images)
        sizes = self.output_size(prompt, height, width), *references
        return sum(math.prod(self.grid(*size)) for size in sizes)

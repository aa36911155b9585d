"""FLUX.1 Kontext: edits an image."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gesso.models.flow.editing import EditingModel
from gesso.models.flow.flux import Flux
from gesso.models.flow.references import with_references
from gesso.traces.flow import Conditioning
from gesso.types import Prompt, Size

AREA = 1024**2  # of the pipeline's sizes


class Kontext(EditingModel, Flux):
    """FLUX.1 dev with the input image as further tokens, whose first position id is 1."""

    pipeline = "FluxKontextPipeline"
    input_images = range(1, 2)

    def encode(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        return with_references(self, super().encode(prompts, size), prompts)

    def reference_size(self, height: int, width: int) -> tuple[int, int]:
        """The nearest of the ratios that the model was trained on, at the area of an output image.
        For outputs of 1024² these are the sizes of the pipeline. For smaller ones, an image of the
        output's area that can be cut into tokens keeps its size, as the bundled signs do."""
        from diffusers.pipelines.flux import pipeline_flux_kontext as kontext

        factor = self.cell * self.patch
        if height * width == self.area < AREA and height % factor == width % factor == 0:
            return height, width
        sizes = kontext.PREFERRED_KONTEXT_RESOLUTIONS
        _, wide, tall = min((abs(width / height - w / h), w, h) for w, h in sizes)
        scale = math.sqrt(self.area / AREA)
        tall, wide = (max(1, round(side * scale / factor)) * factor for side in (tall, wide))
        return tall, wide

"""The bundled models: the one table of their names, families and classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

FamilyName = Literal["draws", "writes"]
"""Flow models, through diffusers; language and vision-language models, through transformers."""
FAMILIES: tuple[FamilyName, ...] = get_args(FamilyName)


@dataclass(frozen=True)
class BundledModel:
    family: FamilyName
    reference: str  # "module:Class"


MODELS = {
    "sd3": BundledModel("draws", "gesso.models.flow.sd3:SD3"),
    "flux": BundledModel("draws", "gesso.models.flow.flux:Flux"),
    "qwen-image": BundledModel("draws", "gesso.models.flow.qwen_image:QwenImage"),
    "vision-language": BundledModel("writes", "gesso.models.tokens.vision_language:VisionLanguage"),
    "causal": BundledModel("writes", "gesso.models.tokens.causal:Causal"),
}

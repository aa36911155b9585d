"""The table of bundled models: names, families and classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

FamilyName = Literal["flow", "language"]
"""Flow models (diffusers); language and vision-language models (transformers)."""
FAMILIES: tuple[FamilyName, ...] = get_args(FamilyName)


@dataclass(frozen=True)
class BundledModel:
    family: FamilyName
    reference: str  # "module:Class"


MODELS = {
    "sd3": BundledModel("flow", "gesso.models.flow.sd3:SD3"),
    "flux": BundledModel("flow", "gesso.models.flow.flux:Flux"),
    "kontext": BundledModel("flow", "gesso.models.flow.kontext:Kontext"),
    "flux2": BundledModel("flow", "gesso.models.flow.flux2:Flux2"),
    "flux2-klein": BundledModel("flow", "gesso.models.flow.flux2:Flux2Klein"),
    "qwen-image": BundledModel("flow", "gesso.models.flow.qwen_image:QwenImage"),
    "qwen-edit": BundledModel("flow", "gesso.models.flow.qwen_edit:QwenEdit"),
    "z-image": BundledModel("flow", "gesso.models.flow.z_image:ZImage"),
    "sana": BundledModel("flow", "gesso.models.flow.sana:Sana"),
    "wan": BundledModel("flow", "gesso.models.flow.wan:Wan"),
    "wan-i2v": BundledModel("flow", "gesso.models.flow.wan_i2v:WanI2V"),
    "vision-language": BundledModel(
        "language", "gesso.models.tokens.vision_language:VisionLanguage"
    ),
    "causal": BundledModel("language", "gesso.models.tokens.causal:Causal"),
}

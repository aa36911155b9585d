"""Decides whether a model folds its LoRA into the weights; the only place that does so."""

from __future__ import annotations

from gesso import config


def folds_lora(section: config.AnyModel, device_type: str) -> bool:
    """`model.fold`, or if unset whether folding is faster: on CUDA, for language models only in
    half precision. An adapter cannot be folded into quantized weights."""
    if section.lora is None or section.quantize is not None:
        return False
    if section.fold is not None:
        return section.fold
    if isinstance(section, config.TokenModel) and section.dtype == "float32":
        return False
    return device_type == "cuda"


def estimated_to_fold(section: config.AnyModel, one_pass: bool = False) -> bool:
    """The same for a memory estimate."""
    return folds_lora(section, "cuda" if estimated_on_gpu(section, one_pass) else "cpu")


def estimated_on_gpu(section: config.AnyModel, one_pass: bool = False) -> bool:
    """A memory estimate has no device. It assumes a GPU, unless the recipe is in float32 without
    one-pass gradients, which require folded adapters."""
    return section.dtype != "float32" or one_pass

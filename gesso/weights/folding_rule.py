"""Whether a model folds its LoRA into the weights. Decided here and nowhere else."""

from __future__ import annotations

from gesso import config


def folds_lora(section: config.AnyModel, device_type: str) -> bool:
    """`model.fold`, or without it whether folding pays: on CUDA, for token models in half precision
    only. Quantized weights cannot hold an adapter, and weights on the meta device hold nothing."""
    if section.lora is None or section.quantize is not None or device_type == "meta":
        return False
    if section.fold is not None:
        return section.fold
    if isinstance(section, config.TokenModel) and section.dtype == "float32":
        return False
    return device_type == "cuda"


def estimated_to_fold(section: config.AnyModel, one_pass: bool = False) -> bool:
    """The same for a memory estimate, which does not know the device: a GPU, unless the recipe is
    in float32 and does not take one-pass gradients, which need folded adapters."""
    on_gpu = section.dtype != "float32" or one_pass
    return folds_lora(section, "cuda" if on_gpu else "cpu")

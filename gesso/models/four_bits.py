"""What `model.quantize` needs, for image and language models alike."""

from __future__ import annotations

import importlib.util

import torch

from gesso.types import UserError


def require_four_bits(device: torch.device) -> None:
    if device.type != "cuda":
        raise UserError(
            f'model.quantize = "nf4" requires a CUDA device, got {device}; remove model.quantize'
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            'model.quantize = "nf4" requires bitsandbytes: pip install "gesso[quantize]"'
        )

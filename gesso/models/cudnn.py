"""Disables cuDNN attention for head sizes where its backward is unsafe."""

from __future__ import annotations

import torch

SAFE_HEAD_SIZES = {64}
"""Head sizes for which cuDNN attention stays enabled: that of SD3, with correct gradients for 32
sequence lengths. With 16, and with 128 as in FLUX and Qwen-Image, some gradients are not finite
(cuDNN 9.19, H200)."""


def settle_attention(device: torch.device, head: int | None = None) -> None:
    """`head`: the head size; None: several sizes. Applies to the whole process: gradient
    checkpointing recomputes a pass outside of any `with` block."""
    if device.type == "cuda" and head not in SAFE_HEAD_SIZES:
        torch.backends.cuda.enable_cudnn_sdp(False)

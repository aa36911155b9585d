"""Disables cuDNN attention for head sizes where its backward is unsafe."""

from __future__ import annotations

import torch

SOUND = {64}
"""Head sizes for which cuDNN attention stays on: SD3's, with correct gradients for 32 lengths.
With 16 and with 128, the size of FLUX and Qwen-Image, some are not finite (cuDNN 9.19, H200)."""


def settle_attention(device: torch.device, head: int | None = None) -> None:
    """`head`: the head size; None: several sizes. Applies to the whole process: gradient
    checkpointing recomputes a pass outside of any `with` block."""
    if device.type == "cuda" and head not in SOUND:
        torch.backends.cuda.enable_cudnn_sdp(False)

"""Which of torch's attentions a model may run with."""

from __future__ import annotations

import torch

SOUND = {64}
"""Sizes of heads for which cuDNN's attention is left on, SD3's: gradients of 32 lengths were seen
right. With 16 and with 128 some are not finite, of FLUX and Qwen-Image, too (cuDNN 9.19, H200)."""


def settle_attention(device: torch.device, head: int | None = None) -> None:
    """Switches cuDNN's attention off, but for heads of a sound size; None: of several sizes. It
    holds for the process: gradient checkpointing runs a pass again where no `with` block is left.
    """
    if device.type == "cuda" and head not in SOUND:
        torch.backends.cuda.enable_cudnn_sdp(False)

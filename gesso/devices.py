"""Copies from the host to a device, and whether Triton is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

HAS_TRITON = find_spec("triton") is not None


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on this device. A copy from pageable host memory would wait until the device has
    finished all earlier work; one from pinned memory is only enqueued."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)

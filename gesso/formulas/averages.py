"""Moving averages of weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def ema_decay(n: int, limit: float) -> float:
    """min((1+n)/(10+n), limit): a short average at first. n counts optimizer steps, from 1."""
    return min((1 + n) / (10 + n), limit)


def rising_decay(n: int, limit: float) -> float:
    """min(.001·n, limit): the old policy of AWM and DGPO. n counts optimizer steps, from 1."""
    return min(0.001 * n, limit)


@torch.no_grad()
def blend_(average: Mapping[str, Tensor], new: Mapping[str, Tensor], decay: float) -> None:
    """average ← decay·average + (1−decay)·new, in place, name by name."""
    for name, tensor in average.items():
        tensor.lerp_(new[name].detach().to(tensor.dtype), 1 - decay)

"""Policy-gradient objectives over log-probs. All tensors share one shape, one entry a term."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Surrogate:
    loss: Tensor  # one value a term, to be minimised
    ratio: Tensor  # detached
    clipped: Tensor  # bool: the clip decided the term, so it gives no gradient


def clipped(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, low: float, high: float
) -> Surrogate:
    """PPO's clip: max(−A·r, −A·clip(r, 1−low, 1+high)), r = exp(logp − old_logp)."""
    ratio = torch.exp(logp - old_logp)
    free = -advantage * ratio
    bound = -advantage * ratio.clamp(1 - low, 1 + high)
    return Surrogate(torch.maximum(free, bound), ratio.detach(), (bound > free).detach())

"""Policy-gradient objectives over log-probs. All tensors share one shape, one entry a term."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Surrogate:
    loss: Tensor  # one value a term, to be minimised
    ratio: Tensor  # detached
    clipped: Tensor  # bool: clipped or masked, so the term gives no gradient


def clipped(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, low: float, high: float
) -> Surrogate:
    """PPO's clip: max(−A·r, −A·clip(r, 1−low, 1+high)), r = exp(logp − old_logp)."""
    ratio = torch.exp(logp - old_logp)
    free = -advantage * ratio
    bound = -advantage * ratio.clamp(1 - low, 1 + high)
    return Surrogate(torch.maximum(free, bound), ratio.detach(), (bound > free).detach())


def guarded(
    logp: Tensor,
    old_logp: Tensor,
    advantage: Tensor,
    divergence: Tensor,
    std: Tensor,
    clip: float,
) -> Surrogate:
    """GRPO-Guard (arXiv 2510.22319): PPO's clip of r = exp((logp − old_logp + b)·c), where c is the
    step's standard deviation and b = mean (μ−μ_old)²/2c², the `divergence` of this very term.

    On a Gaussian step r = exp(mean ε·(μ−μ_old)): its logarithm has mean 0 and the same scale at
    every noise level, so that one clip range serves all steps. The reference takes b over the whole
    batch by mistake (its author agrees); here it is the term's own.
    """
    return clipped(
        (logp - old_logp + divergence) * std, torch.zeros_like(logp), advantage, clip, clip
    )


def masked(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, divergence: Tensor, limit: float
) -> Surrogate:
    """Flow-DPPO: −A·r, but a term whose step has moved by `divergence` ≥ limit and would be pushed
    further (r > 1 with A > 0, or r < 1 with A < 0) gives no gradient."""
    ratio = torch.exp(logp - old_logp)
    further = ((ratio > 1) & (advantage > 0)) | ((ratio < 1) & (advantage < 0))
    dropped = (further & (divergence >= limit)).detach()
    loss = torch.where(dropped, (-advantage * ratio).detach(), -advantage * ratio)
    return Surrogate(loss, ratio.detach(), dropped)

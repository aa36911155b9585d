"""Classifier-free guidance (arXiv 2207.12598), for sampling, training and the memory estimate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gesso.models.flow.base import FlowModel
from gesso.traces.flow import Conditioning
from gesso.types import GuidanceGradient, Which


@dataclass(frozen=True)
class Guided:
    velocity: Tensor  # (N, C, H, W)
    negative: Tensor | None = None  # (N, C, H, W): of the negative branch, if without gradient


def guided(
    model: FlowModel,
    x: Tensor,
    sigma: Tensor,
    cond: Conditioning,
    negative: Conditioning | None,
    scale: float,
    weights: Which = "current",
    gradient: GuidanceGradient = "both",
    negative_velocity: Tensor | None = None,
) -> Guided:
    """The velocity at (x, σ) under guidance.

    No `negative`: one pass. gradient="both" differentiates both branches (as in the newest
    reference code); "conditional" runs the negative branch without gradient (as in the older one;
    half the memory). A stored `negative_velocity` replaces the pass over `negative`.
    """
    if negative_velocity is not None:
        unconditional = negative_velocity
    elif negative is None:
        return Guided(model.velocity(x, sigma, cond, weights))
    elif gradient == "both":
        branches = _both(model, x, sigma, cond, negative, weights)
        return Guided(model.guide(*branches, scale, sigma))
    else:
        with torch.no_grad():  # first: the other pass saves its activations for backward
            unconditional = model.velocity(x, sigma, negative, weights)
    conditional = model.velocity(x, sigma, cond, weights)
    return Guided(model.guide(unconditional, conditional, scale, sigma), unconditional)


def rows_per_sample(negative: Conditioning | None, gradient: GuidanceGradient) -> int:
    """Number of rows of a sample in a differentiated pass of the network."""
    return 2 if negative is not None and gradient == "both" else 1


def _both(
    model: FlowModel,
    x: Tensor,
    sigma: Tensor,
    cond: Conditioning,
    negative: Conditioning,
    weights: Which,
) -> tuple[Tensor, Tensor]:
    """Velocities of the negative and of the positive branch, from one pass. The two rows of a
    sample are adjacent, so that `Policy.per_sample_grads` sums their gradients."""
    pairs = torch.arange(2 * len(x), device=x.device).view(2, -1).T.flatten()
    conditions = Conditioning.stack([negative, cond]).rows(pairs)
    v = model.velocity(x.repeat_interleave(2, 0), sigma.repeat_interleave(2), conditions, weights)
    unconditional, conditional = v.unflatten(0, (-1, 2)).unbind(1)
    return unconditional, conditional

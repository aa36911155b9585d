"""Flow matching on clean samples: the loss of predicting noise minus image, and the log-likelihoods
and preferences that AWM and DGPO derive from it.

x_t = (1−t)·x0 + t·ε. v, x0, ε: (N, C, H, W); everything else (N,). L is `loss`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gesso.formulas.precision import wide
from gesso.formulas.shapes import column

Weighting = Literal["uniform", "t", "t2", "huber", "ghuber"]
_SMALL = 1e-10  # keeps the gradient of a root finite at L = 0


def noised(x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """x_t = (1−t)·x0 + t·ε."""
    return torch.lerp(x0, noise, column(t, x0))


def on_schedule(sigmas: Tensor, place: Tensor) -> Tensor:
    """t at places of a schedule, from 0, its first step, to its end; between two steps by
    interpolation."""
    before = place.long().clamp(max=len(sigmas) - 2)
    return torch.lerp(sigmas[before], sigmas[before + 1], place - before)


def loss(v: Tensor, x0: Tensor, noise: Tensor) -> Tensor:
    """L = mean over all axes of a latent of (v − (ε − x0))², in float32 or wider."""
    return distance(v, wide(noise) - wide(x0))


def distance(v: Tensor, other: Tensor) -> Tensor:
    """Mean over all axes of a latent of (v − v')², in float32 or wider."""
    return (wide(v) - wide(other)).square().flatten(1).mean(1)


def log_likelihood(loss: Tensor, t: Tensor, weighting: Weighting, power: float) -> Tensor:
    """AWM (arXiv 2509.25050): −g(L), which replaces the log-prob of a sample; float64.

    g is L, tL, t²L, t(√(L+1e-10) − 1e-5) ("huber"), or t((L+1e-10)^p − 1e-10^p)/p ("ghuber").
    """
    loss, t = loss.double(), t.double()
    if weighting == "uniform":
        return -loss
    if weighting == "t":
        return -t * loss
    if weighting == "t2":
        return -t.square() * loss
    if weighting == "huber":
        return -t * ((loss + _SMALL).sqrt() - _SMALL**0.5)
    return -t * ((loss + _SMALL) ** power - _SMALL**power) / power


def group_weights(
    advantage: Tensor, loss: Tensor, reference: Tensor, group: Tensor, beta: float
) -> Tensor:
    """DGPO (arXiv 2510.08425): σ(S) of each term's group, S = (β/G)·Σ A_i(L_i − L_ref,i) over the G
    terms of a group. Every group must be complete: cut in parts it has other weights."""
    _, index, counts = group.unique(return_inverse=True, return_counts=True)
    gain = advantage.double() * (loss.double() - reference.double())
    sums = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, index, gain)
    return torch.sigmoid(beta * sums / counts)[index]


def beyond(loss: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """DGPO's clip: True where exp(L_old − L) has moved beyond 1 ± clip in the direction of the
    advantage. Such a term has no gradient."""
    ratio = (old.double() - loss.detach().double()).exp()
    return torch.where(advantage > 0, ratio > 1 + clip, ratio < 1 - clip)

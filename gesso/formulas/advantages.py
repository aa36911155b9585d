"""Advantages from rewards and groups. rewards: (N,), group: (N,) integer ids."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-4


def group_relative(
    rewards: Tensor, group: Tensor, std: Literal["global", "group"] = "global"
) -> Tensor:
    """Flow-GRPO: (r − mean of its group) / (std + 1e-4), float64, population std (ddof 0).

    std="global" divides by the standard deviation of the whole batch (the default for SD3.5),
    "group" by the group's own. A group of one, or of equal rewards, says nothing: its advantage
    is 0, exactly.
    """
    rewards = rewards.double()
    _, row = group.unique(return_inverse=True)
    count = torch.bincount(row).double()  # (G,)
    mean = torch.zeros_like(count).index_add_(0, row, rewards) / count
    centred = rewards - mean[row]
    if std == "global":
        scale = rewards.std(correction=0)
    else:
        variance = torch.zeros_like(count).index_add_(0, row, centred.square()) / count
        scale = variance.sqrt()[row]
    return torch.where(_flat(rewards, row)[row], 0.0, centred / (scale + EPSILON))


def gdpo(rewards: Tensor, weights: Tensor, group: Tensor) -> Tensor:
    """GDPO (arXiv 2601.05242) for several rewards, (N, R) with weights (R,): each is normalised
    within its group by the group's own std, then the weighted sum over the whole batch. A reward of
    a large scale no longer drowns the others, as it does in a sum of raw rewards."""
    each = [group_relative(column, group, "group") for column in rewards.double().unbind(1)]
    total = torch.stack(each, 1) @ weights.double()
    return (total - total.mean()) / (total.std(correction=0) + EPSILON)


def flat_groups(rewards: Tensor, group: Tensor) -> float:
    """Share of the groups whose rewards are all equal: they carry no signal."""
    _, row = group.unique(return_inverse=True)
    return float(_flat(rewards.double(), row).double().mean())


def with_spread(rewards: Tensor, group: Tensor, multiple: int) -> Tensor:
    """Indices, in order, of the samples whose group has some spread in some reward (N, R), topped
    up with samples of flat groups to a multiple of `multiple` (mini-batches × ranks, so that all
    get equally many). Empty when no group has any spread."""
    _, row = group.unique(return_inverse=True)
    flat = torch.stack([_flat(column.double(), row) for column in rewards.unbind(1)]).all(0)[row]
    kept = (~flat).nonzero()[:, 0]
    if len(kept) == 0:
        return kept
    spare = flat.nonzero()[: -len(kept) % multiple, 0]
    return torch.cat([kept, spare]).sort().values


def _flat(rewards: Tensor, row: Tensor) -> Tensor:
    """(G,) bool: all rewards of the group are equal."""
    groups = int(row.max()) + 1
    low = torch.full((groups,), float("inf"), dtype=torch.float64)
    high = torch.full((groups,), float("-inf"), dtype=torch.float64)
    low = low.scatter_reduce(0, row, rewards, "amin")
    return low == high.scatter_reduce(0, row, rewards, "amax")

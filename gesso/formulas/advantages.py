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
    "group" by the group's own. A group of one says nothing: its advantage is 0.
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
    return torch.where(count[row] > 1, centred / (scale + EPSILON), 0.0)


def flat_groups(rewards: Tensor, group: Tensor) -> float:
    """Share of the groups whose rewards are all equal: they carry no signal."""
    _, row = group.unique(return_inverse=True)
    groups = int(row.max()) + 1
    low = torch.full((groups,), float("inf"), dtype=torch.float64)
    high = torch.full((groups,), float("-inf"), dtype=torch.float64)
    low = low.scatter_reduce(0, row, rewards.double(), "amin")
    high = high.scatter_reduce(0, row, rewards.double(), "amax")
    return float((low == high).double().mean())

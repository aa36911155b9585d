"""How different the samples of one prompt are. x: (N, …), group: (N,) integer ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def within_groups(x: Tensor, group: Tensor) -> float:
    """Mean over the groups of the mean over a group's pairs (a, b) of sqrt(mean (a − b)²).

    The root mean square over the elements does not depend on the size of x: two independent
    standard normal samples lie √2 apart at any resolution. Every group counts the same, whatever
    its size; a group of one has no pair and is left out; NaN when all have.
    float32, one group at a time.
    """
    distances = []
    for g in group.unique().tolist():
        members = x[(group == g).to(x.device)].flatten(1).float()  # (G, elements)
        if len(members) > 1:
            pairs = torch.pdist(members) / members.shape[1] ** 0.5  # (G·(G−1)/2,)
            distances.append(pairs.mean())
    return float(torch.stack(distances).mean()) if distances else float("nan")


def distinct(texts: Sequence[str], group: Tensor) -> float:
    """Mean over the groups of (different texts − 1) / (texts − 1): 0 where all are the same, 1
    where no two are. A group of one is left out; NaN when all are."""
    shares = []
    for g in group.unique().tolist():
        members = [text for text, h in zip(texts, group.tolist(), strict=True) if h == g]
        if len(members) > 1:
            shares.append((len(set(members)) - 1) / (len(members) - 1))
    return sum(shares) / len(shares) if shares else float("nan")

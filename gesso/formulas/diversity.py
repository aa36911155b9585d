"""Diversity of the samples of one prompt. x: (N, …), group: (N,) integer ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def within_groups(x: Tensor, group: Tensor) -> float:
    """Mean over groups of the mean over the pairs (a, b) of a group of sqrt(mean (a − b)²).

    The root mean square over elements does not depend on the size of x: the distance between two
    independent standard normal samples is √2 at any resolution. Every group has equal weight,
    whatever its size. A group of one has no pair and is skipped; NaN if every group is skipped.
    float32, one group at a time.
    """
    distances = []
    for g in group.unique().tolist():
        members = x[(group == g).to(x.device)].flatten(1).float()  # (G, elements)
        if len(members) > 1:
            pairs = torch.pdist(members) / members.shape[1] ** 0.5  # (G·(G−1)/2,)
            distances.append(pairs.mean())
    return float(torch.stack(distances).mean()) if distances else float("nan")


def isolation(x: Tensor, group: Tensor) -> Tensor:
    """(N,) float64: d_i = min over the others j of the group of 1 − cos(x_i, x_j). NaN in a group
    of one. One group at a time, on the device of x."""
    found = torch.full((len(x),), float("nan"), dtype=torch.float64)
    for g in group.unique().tolist():
        rows = (group == g).nonzero()[:, 0]
        if len(rows) > 1:
            members = torch.nn.functional.normalize(x[rows.to(x.device)].flatten(1).double())
            distances = 1 - members @ members.T  # (G, G)
            distances.fill_diagonal_(float("inf"))
            found[rows] = distances.amin(1).clamp(min=0).cpu()
    return found


def distinct(texts: Sequence[str], group: Tensor) -> float:
    """Mean over groups of (distinct texts − 1) / (texts − 1): 0 if all texts are the same, 1 if all
    are distinct. A group of one is skipped; NaN if every group is skipped."""
    shares = []
    for g in group.unique().tolist():
        members = [text for text, h in zip(texts, group.tolist(), strict=True) if h == g]
        if len(members) > 1:
            shares.append((len(set(members)) - 1) / (len(members) - 1))
    return sum(shares) / len(shares) if shares else float("nan")

"""Confidence intervals of a mean.

Samples of one prompt are not independent, so the bootstrap resamples prompts, each with all its
samples.

Shape legend: P prompts · B bootstrap resamples
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_INDICES = 2**22  # prompt indices drawn at a time


@dataclass(frozen=True)
class Interval:
    """NaN where it is undefined: one prompt has no spread."""

    mean: float
    error: float  # standard error
    low: float
    high: float


def clustered(
    sums: Tensor, counts: Tensor, seed: int = 0, draws: int = 10_000, level: float = 0.95
) -> Interval:
    """Mean over all samples and its percentile interval by the cluster bootstrap.

    sums, counts: (P,), of each prompt's values. m = Σ_p sums_p / Σ_p counts_p; each of the B draws
    resamples P prompts with replacement and computes m_b the same way. The standard error is the
    standard deviation of the m_b, the interval their (1 ± level)/2 quantiles (Efron and Tibshirani
    1993, ch. 13; clusters: Davison and Hinkley 1997, 3.8). Prompts without a value are skipped.
    If all values are equal, the interval has width 0, which is overconfident.
    """
    kept = counts > 0
    sums, counts = sums[kept].double(), counts[kept].double()
    prompts = len(sums)
    if prompts == 0:
        return Interval(math.nan, math.nan, math.nan, math.nan)
    mean = float(sums.sum() / counts.sum())
    if prompts == 1:
        return Interval(mean, math.nan, math.nan, math.nan)
    generator = torch.Generator().manual_seed(seed)
    rows = max(1, MAX_INDICES // prompts)
    chunks = []
    for start in range(0, draws, rows):
        size = (min(rows, draws - start), prompts)
        index = torch.randint(prompts, size, generator=generator)  # (b, P)
        chunks.append(sums[index].sum(1) / counts[index].sum(1))
    means = torch.cat(chunks)  # (B,)
    edges = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.quantile(means, edges).tolist()
    return Interval(mean, float(means.std(correction=0)), low, high)

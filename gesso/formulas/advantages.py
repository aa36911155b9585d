"""Advantages from rewards. rewards: (N,), group: (N,) integer ids.

For language models also per token, (N, S) padded on the right: mask is True on response tokens,
which start at 0, at least one per row (gaps between them are skipped). Everything is float64
without gradient, and 0 outside the mask. Statistics cover the whole batch: compute them before it
is split into mini-batches or over ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-4
MIN_VARIANCE = 1e-8
ALIKE = 1e-9  # distance below which samples differ by rounding only
Std = Literal["global", "group", "none"]


def group_relative(
    rewards: Tensor,
    group: Tensor,
    std: Std = "global",
    correction: int = 0,
    epsilon: float = EPSILON,
) -> Tensor:
    """(r − mean of its group) / (std + epsilon), float64; `correction` is the std's ddof.

    std="global" divides by the standard deviation of the whole batch (Flow-GRPO's default for
    SD3.5), "group" by the std of the group, "none" does not divide (Dr.GRPO, arXiv 2503.20783: a
    std weights prompts by their difficulty). The defaults are Flow-GRPO's, population std and 1e-4;
    GRPO for tokens (arXiv 2402.03300) has "group", correction 1 and 1e-6 in the reference codes.
    A group of one or of equal rewards has no signal: the advantage is exactly 0.
    """
    rewards = rewards.double()
    _, row = group.unique(return_inverse=True)
    count = torch.bincount(row).double()  # (G,)
    mean = torch.zeros_like(count).index_add_(0, row, rewards) / count
    centred = rewards - mean[row]
    if std == "none":
        advantages = centred
    elif std == "global":
        degrees = min(correction, len(rewards) - 1)  # a batch of one has no unbiased std
        advantages = centred / (rewards.std(correction=degrees) + epsilon)
    else:
        squares = torch.zeros_like(count).index_add_(0, row, centred.square())
        variance = squares / (count - correction)  # 0/0 in a group of one, masked below
        advantages = centred / (variance.sqrt()[row] + epsilon)
    return torch.where(_flat(rewards, row)[row], 0.0, advantages)


def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """RLOO (arXiv 2402.14740): r − (Σr − r)/(G − 1): the baseline is the mean of the others. Equal
    to G/(G − 1) times r − mean. The advantage is exactly 0 in a group of one, which has no others,
    and in a group of equal rewards.

    RLOO in OpenRLHF and LMM-R1 adds: clamp to ±10, `on_last`, −β·k1 at each token, `to_go` with
    γ = 1, and in LMM-R1 `whiten`.
    """
    rewards = rewards.double()
    _, row = group.unique(return_inverse=True)
    count = torch.bincount(row).double()  # (G,)
    total = torch.zeros_like(count).index_add_(0, row, rewards)
    others = (total[row] - rewards) / (count[row] - 1)  # 0/0 in a group of one, masked below
    return torch.where(_flat(rewards, row)[row], 0.0, rewards - others)


def on_last(rewards: Tensor, mask: Tensor) -> Tensor:
    """(N, S): each row's reward on its last response token, 0 elsewhere."""
    position = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    last = position.masked_fill(~mask, -1).amax(1, keepdim=True)  # (N, 1)
    return torch.where(position == last, rewards.double()[:, None], 0.0)


def to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """(N, S): R_t = r_t + γ·R_{t+1} over response tokens only, 0 after the last. rewards: (N, S).

    REINFORCE++ (arXiv 2501.03262) is this over `on_last` minus β·KL at each token, then `whiten`;
    its -baseline variant first subtracts the group mean from the rewards (`group_relative` with
    std="none").
    """
    rewards = rewards.detach().double()
    returns = torch.zeros_like(rewards)
    later = torch.zeros_like(rewards[:, 0])  # (N,)
    for t in reversed(range(rewards.shape[1])):
        later = torch.where(mask[:, t], rewards[:, t] + gamma * later, later)
        returns[:, t] = later
    return torch.where(mask, returns, 0.0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(N, S): (x − mean) / √max(variance, 1e-8) over all response tokens of the batch together, so
    that a long response has more weight; 0 outside the mask.

    The variance is the population variance (divided by the number of tokens), as in OpenRLHF; verl
    uses the unbiased one plus 1e-8 and rejects a single token. Equal values, and therefore a single
    token, give exactly 0.
    """
    inside = values.detach().double()[mask]  # (tokens,)
    centred = inside - inside.sum() / len(inside)
    variance = centred.square().sum() / len(inside)
    if inside.min() == inside.max():
        centred = torch.zeros_like(centred)
    whitened = torch.zeros_like(values, dtype=torch.float64)
    whitened[mask] = centred / variance.clamp(min=MIN_VARIANCE).sqrt()
    return whitened


@dataclass(frozen=True)
class Estimate:
    advantages: Tensor  # (N, S)
    returns: Tensor  # (N, S): the critic's targets


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Estimate:
    """Generalised advantage estimation (arXiv 1506.02438) over response tokens only:
    δ_t = r_t + γ·V_{t+1} − V_t, A_t = δ_t + γλ·A_{t+1}, returns = A + V. rewards, values: (N, S).

    The value after the last response token is 0, whatever the critic predicts for the padding.
    Returns are computed before any `whiten`, which would change their scale. The caller whitens
    only the advantages.
    """
    rewards, values = rewards.detach().double(), values.detach().double()
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])  # (N,)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        inside = mask[:, t]
        next_advantage = torch.where(inside, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(inside, values[:, t], next_value)
        advantages[:, t] = next_advantage
    return Estimate(torch.where(mask, advantages, 0.0), torch.where(mask, advantages + values, 0.0))


def gdpo(rewards: Tensor, weights: Tensor, group: Tensor) -> Tensor:
    """GDPO (arXiv 2601.05242) for several rewards, (N, R) with weights (R,): each reward is
    normalised within its group by the group std, then the weighted sum is normalised over the whole
    batch. A reward with a large scale does not dominate, as it does in a sum of raw rewards. NaN
    means that a reward does not apply to the sample: it is excluded from that reward's statistics
    and contributes 0.
    """
    each = torch.zeros_like(rewards, dtype=torch.float64)
    for i, column in enumerate(rewards.double().unbind(1)):
        applies = ~column.isnan()
        if applies.any():
            each[applies, i] = group_relative(column[applies], group[applies], "group")
    total = each @ weights.double()
    return (total - total.mean()) / (total.std(correction=0) + EPSILON)


def doubt(reward: Tensor, others: Tensor) -> Tensor:
    """GARDO (arXiv 2512.24138): U = w(R) − mean over k of w(R_k), how much better the trained
    reward (N,) ranks a sample than other rewards (N, K) do. w is the share of the batch with a
    lower value, so that equal values share a rank. (N,) float64 in (−1, 1).

    NaN in `others`: that reward does not apply to the sample, and is left out of its mean; U is NaN
    if none applies. The authors' code ranks from the best, which turns the sign: there a sample
    that only the trained reward likes has the lowest U.
    """
    ranks = torch.stack([_share_beaten(column) for column in others.unbind(1)], 1)  # (N, K)
    return _share_beaten(reward) - ranks.nanmean(1)


def _share_beaten(values: Tensor) -> Tensor:
    """(N,): the share of the values that are lower; NaN values are left out."""
    values = values.double()
    known = values[~values.isnan()].sort().values
    lower = torch.searchsorted(known, values.contiguous(), right=False).double()
    return torch.where(values.isnan(), torch.nan, lower / max(len(known), 1))


def most_doubted(doubts: Tensor, share: float) -> Tensor:
    """(N,) bool: the `share` (rounded up) with the highest U among the samples with U ≥ 0, and
    those that are equal to the last of them."""
    pool = doubts[doubts >= 0].sort(descending=True).values
    if not len(pool):
        return torch.zeros_like(doubts, dtype=torch.bool)
    last = min(len(pool), math.ceil(share * len(pool) - 1e-9)) - 1  # .1 · 30 is 3.0000000000000004
    return doubts >= pool[max(last, 0)]


def diverse(advantages: Tensor, isolation: Tensor, group: Tensor) -> Tensor:
    """GARDO: positive advantages (N,) times d_i / (mean d of the group), where d (N,) is the
    distance to the nearest other sample of the group. A group whose samples are all alike, or with
    a single one, is unchanged. float64.

    As in the authors' code; the paper multiplies by d_i alone.
    """
    advantages, isolation = advantages.double(), isolation.double().nan_to_num(nan=0.0)
    _, row = group.unique(return_inverse=True)
    count = torch.bincount(row).double()  # (G,)
    mean = (torch.zeros_like(count).index_add_(0, row, isolation) / count)[row]
    factor = torch.where(mean > ALIKE, isolation / mean, 1.0)
    return torch.where(advantages > 0, advantages * factor, advantages)


def extremes(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) bool each: the best and the worst of every group, the first of equal ones. A group
    without spread has neither: a tie is no preference."""
    best, worst = (torch.zeros(len(values), dtype=torch.bool) for _ in range(2))
    for one in group.unique():
        rows = (group == one).nonzero()[:, 0]
        high, low = rows[values[rows].argmax()], rows[values[rows].argmin()]
        if values[high] > values[low]:
            best[high] = worst[low] = True
    return best, worst


def flat_groups(rewards: Tensor, group: Tensor) -> float:
    """Fraction of groups in which all rewards are equal, so that they carry no signal."""
    _, row = group.unique(return_inverse=True)
    return float(_flat(rewards.double(), row).double().mean())


def with_spread(rewards: Tensor, group: Tensor, multiple: int) -> Tensor:
    """Indices, in order, of the samples whose group has spread in at least one reward (N, R),
    padded to a multiple of `multiple`. Empty when no group has spread. NaN: the reward does not
    apply."""
    _, row = group.unique(return_inverse=True)
    flat = torch.stack([_flat(column.double(), row) for column in rewards.unbind(1)]).all(0)[row]
    return _padded(~flat, multiple)


def nonzero(advantages: Tensor, multiple: int) -> Tensor:
    """Indices, in order, of the samples whose advantage (N,) is not 0, padded to a multiple of
    `multiple`. Empty when all are 0."""
    return _padded(advantages != 0, multiple)


def _padded(chosen: Tensor, multiple: int) -> Tensor:
    """Indices of the chosen samples, and of other samples up to a multiple of `multiple`
    (mini-batches × ranks, so that all have the same size)."""
    kept = chosen.nonzero()[:, 0]
    if len(kept) == 0:
        return kept
    spare = (~chosen).nonzero()[: -len(kept) % multiple, 0]
    return torch.cat([kept, spare]).sort().values


def _flat(rewards: Tensor, row: Tensor) -> Tensor:
    """(G,) bool: all rewards of the group are equal, ignoring NaN."""
    groups = int(row.max()) + 1
    low = rewards.new_full((groups,), float("inf"))
    high = rewards.new_full((groups,), float("-inf"))
    low = low.scatter_reduce(0, row, rewards.nan_to_num(nan=float("inf")), "amin")
    return low >= high.scatter_reduce(0, row, rewards.nan_to_num(nan=float("-inf")), "amax")

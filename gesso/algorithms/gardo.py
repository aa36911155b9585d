"""Countermeasures against reward hacking, after GARDO (arXiv 2512.24138): the KL applies only to
samples that other rewards doubt, and its reference is renewed from time to time.

The gated share and the renewals are functions of the metrics so far, so that a resumed run
continues with the same share and reference, on any number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gesso.config import Strict
from gesso.formulas import advantages as adv
from gesso.rollout import Rollout

Row = Mapping[str, Any]
DOUBT, SHARE = "gate/doubt", "gate/share"
KL, RENEWED = "update/kl", "update/renewed"


class KLGate(Strict):
    """The KL applies to the samples that the trained reward ranks much higher than the rewards of
    weight 0 do."""

    share: float = Field(0.1, gt=0, le=1)
    """Share of the samples with U ≥ 0 that the KL applies to, at the start: those with the highest
    U, the rank by the trained reward minus the mean rank by the rewards of weight 0."""
    low: float = Field(0.02, gt=0, le=1)
    """Lowest share."""
    high: float = Field(0.2, gt=0, le=1)
    """Highest share."""
    change: float = Field(0.1, ge=0, lt=1)
    """The share is multiplied by 1 + change when the mean U exceeds that of the last `window`
    iterations, by 1 − change when it is below all of them."""
    window: int = Field(20, ge=1)
    """Iterations that the mean U is compared with."""

    @model_validator(mode="after")
    def _ordered(self) -> KLGate:
        if not self.low <= self.share <= self.high:
            raise ValueError(
                f"low <= share <= high must hold, got low = {self.low:g}, share = {self.share:g}, "
                f"high = {self.high:g}"
            )
        return self

    def doubts(self, rollout: Rollout) -> Tensor:
        """(N,): U of each sample."""
        others = [i for i, weight in enumerate(rollout.weights.values()) if weight == 0]
        return adv.doubt(rollout.rewards, rollout.components[:, others])

    def measured(self, doubts: Tensor) -> dict[str, float]:
        """What `next_share` needs of this iteration: the mean of U ≥ 0."""
        pool = doubts[doubts >= 0]
        mean = float(pool.mean()) if len(pool) else float("nan")
        return {DOUBT: mean, SHARE: self.share}

    def next_share(self, rows: Sequence[Row]) -> float:
        """The share of the iteration after these rows. The authors compare the iteration's own
        mean; here a change applies from the next iteration on."""
        if not rows or rows[-1].get(SHARE) is None:
            return self.share
        share: float = rows[-1][SHARE]
        newest = rows[-1].get(DOUBT)
        seen = [row[DOUBT] for row in rows[:-1] if row.get(DOUBT) is not None]
        earlier = seen[-self.window :]
        if newest is not None and earlier:
            if newest > max(earlier):
                share *= 1 + self.change
            elif newest < min(earlier):
                share *= 1 - self.change
        return min(max(share, self.low), self.high)


class Renewal(Strict):
    """The reference of the KL is a copy of earlier weights of the policy."""

    above: float = Field(3e-4, gt=0)
    """The reference becomes a copy of the current weights after an iteration whose mean KL exceeds
    this value."""
    after: int = Field(15, ge=1)
    """It also does so after this number of iterations without a renewal."""

    def due(self, rows: Sequence[Row]) -> bool:
        """Whether the reference is renewed before the iteration that follows these rows."""
        trained = [row for row in rows if row.get(RENEWED) is not None]
        if not trained:
            return False
        newest = trained[-1].get(KL)
        if newest is not None and newest > self.above:
            return True
        since = [row[RENEWED] for row in trained[-self.after :]]
        return len(since) == self.after and not any(since[1:])


def gated(gate: KLGate | None, rollout: Rollout) -> dict[str, Any]:
    """Fields of `Prepared`: share of the KL of each sample, and metrics."""
    if gate is None:
        return {}
    doubts = gate.doubts(rollout)
    share = adv.most_doubted(doubts, gate.share).float()
    return {"kl_share": share, "metrics": gate.measured(doubts)}


def kl_shares(kl_share: Tensor | None, like: Tensor, terms: int) -> Tensor:
    """(N · terms,) share of the KL of each term; `terms` of each sample, in order. `like`: (N, …)
    on the device of the terms."""
    if kl_share is None:
        kl_share = torch.ones(len(like))
    return kl_share.to(like.device).repeat_interleave(terms)

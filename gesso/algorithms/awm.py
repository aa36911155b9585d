"""Advantage-weighted matching, AWM (arXiv 2509.25050): the flow-matching loss of pretraining,
weighted by advantages. Defaults are the authors' for SD3.5-M with the OCR reward."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from gesso import config
from gesso.algorithms.base import TermLosses
from gesso.algorithms.noised import NoisedAlgorithm, NoisedTerms
from gesso.formulas import matching, objectives
from gesso.types import Which


class AWM(NoisedAlgorithm):
    name: str = "awm"
    updates: int = Field(1, ge=1)
    steps: int = Field(14, ge=1, le=config.MAX_STEPS)
    times: int = Field(6, ge=1)
    first: int = Field(1, ge=0)
    last: int | None = Field(11, ge=0)
    kl: float = Field(0.003, ge=0)
    anchor: float = Field(1.0, ge=0)
    """Weight of mean (v − v_old)², where old is a slow average of the policy."""
    weighting: matching.Weighting = "ghuber"
    """From the matching loss L to a log-likelihood: "uniform" (−L), "t", "t2", "huber" or "ghuber",
    see the formulas page."""
    power: float = Field(0.25, gt=0)
    """Exponent of "ghuber"."""
    clip: float = Field(1.0, gt=0)
    """The ratio is clipped to 1 ± clip. With one update per rollout it is 1."""

    @property
    def compared(self) -> frozenset[Which]:
        return frozenset({"old"} if self.anchor > 0 else ())

    @property
    def clip_range(self) -> float | None:
        return self.clip if self.needs_old_loss else None

    @property
    def needs_old_loss(self) -> bool:
        return self.updates > 1

    def draw_places(self, generator: torch.Generator) -> Tensor:
        """One of each of `times` equal parts of the steps. As in the authors' code, steps before
        `first` count for the size of the first part, if others remain in it."""
        start = 0 if self.first < int(self.levels.stop / self.times + 0.5) else self.first
        edges = (torch.linspace(start, self.levels.stop, self.times + 1) + 0.5).floor()
        low, high = edges[:-1].clamp(min=self.first), edges[1:]
        return (low + torch.rand(self.times, generator=generator) * (high - low)).long()

    def objective(
        self, terms: NoisedTerms, v: Tensor, others: Mapping[Which, Tensor]
    ) -> TermLosses:
        matched = terms.matching_loss(v)
        old = terms.old_loss if self.needs_old_loss else matched.detach()
        logp, old_logp = (
            matching.log_likelihood(x, terms.t, self.weighting, self.power) for x in (matched, old)
        )
        advantage = terms.advantage / self.advantage.clip  # within ± 1, as in the authors' code
        surrogate = objectives.clipped(logp, old_logp, advantage, self.clip, self.clip)
        stats = {"matching": matched.detach(), "clipped": surrogate.clipped.float()}
        if self.anchor == 0:
            return TermLosses(surrogate.loss, stats)
        drift = matching.distance(v, others["old"])
        stats["drift"] = drift.detach()
        return TermLosses(surrogate.loss + self.anchor * drift, stats)

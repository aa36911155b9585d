"""Rejection sampling fine-tuning: supervised fine-tuning on the best sample of each group, with the
flow-matching loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from gesso.algorithms.base import TermLosses
from gesso.algorithms.noised import NoisedTerms, Picked
from gesso.rollout import Rollout
from gesso.types import Which


class FlowRFT(Picked):
    name: str = "flow-rft"
    updates: int = Field(1, ge=1)
    times: int = Field(1, ge=1)

    whole_groups: ClassVar[bool] = True

    def advantages(self, rollout: Rollout) -> Tensor:
        """1 for the best sample of a group, 0 for all others and in groups without spread."""
        best, _ = self.extremes(rollout)
        return best.double()

    def objective(
        self, terms: NoisedTerms, v: Tensor, others: Mapping[Which, Tensor]
    ) -> TermLosses:
        matched = terms.matching_loss(v)
        return TermLosses(matched, {"matching": matched.detach()})

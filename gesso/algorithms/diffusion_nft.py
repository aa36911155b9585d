"""DiffusionNFT (arXiv 2509.16117): trains on the forward process, from clean samples and rewards.

No trajectory, no log-prob, no guidance: an ODE under a slowly updated *old* policy generates the
samples, and the loss moves the velocity towards good samples and away from bad ones. Most defaults
are the authors' for SD3.5-M; the recipes contain all of their settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from pydantic import Field
from torch import Tensor

from gesso import config
from gesso.algorithms.base import TermLosses
from gesso.algorithms.noised import NoisedAlgorithm, NoisedTerms
from gesso.formulas import matching, nft
from gesso.types import SampleSpec, Which


class DiffusionNFT(NoisedAlgorithm):
    name: str = "diffusion-nft"
    beta: float = Field(0.1, gt=0)
    """Distance of the two mixture policies from the old policy."""
    kl: float = Field(1e-4, ge=0)
    """Weight of mean (v − v_ref)²."""
    decay: Literal[1, 2] = 1
    """Decay schedule of the old policy, see the formulas page."""

    @property
    def compared(self) -> frozenset[Which]:
        return frozenset({"old"})

    def spec(self, step: int, seed: int, model: config.Model) -> SampleSpec:
        return replace(super().spec(step, seed, model), weights="old")

    def objective(
        self, terms: NoisedTerms, v: Tensor, others: Mapping[Which, Tensor]
    ) -> TermLosses:
        clip, v_old = self.advantage.clip, others["old"]
        optimal = nft.optimality(terms.advantage, clip).float()
        loss = nft.contrast(v, v_old, terms.clean, terms.x_t, terms.t, optimal, self.beta, clip)
        return TermLosses(loss, {"drift": matching.distance(v, v_old).detach()})

    def old_decay(self, optimizer_steps: int) -> float:
        return nft.old_decay(optimizer_steps, self.decay)

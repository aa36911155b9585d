"""Preferences among clean samples, without log-probs: DGPO, of whole groups, and DPO, of the best
and the worst sample of each group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gesso import config
from gesso.algorithms.base import TermLosses
from gesso.algorithms.noised import NoisedAlgorithm, NoisedTerms, Picked
from gesso.formulas import matching
from gesso.models.flow.base import FlowModel
from gesso.ranks import Ranks, fill
from gesso.rollout import Rollout
from gesso.types import SampleSpec, Which


class Preference(NoisedAlgorithm):
    updates: int = Field(1, ge=1)
    guidance: float = Field(4.5, ge=0)
    """Classifier-free guidance scale in sampling; training has none."""
    beta: float = Field(100.0, gt=0)
    """Sharpness of a group's preference."""

    whole_groups: ClassVar[bool] = True

    @model_validator(mode="after")
    def _whole(self) -> Preference:
        if self.advantage.drop_flat:
            raise ValueError(f"{self.name} trains on whole groups; remove advantage.drop_flat")
        if self.renew is not None:
            raise ValueError(
                f"{self.name} prefers samples relative to the model before training; remove renew"
            )
        return self

    @property
    def needs(self) -> frozenset[Which]:
        return frozenset({"reference"})

    def spec(self, step: int, seed: int, model: config.Model) -> SampleSpec:
        return replace(super().spec(step, seed, model), guidance=self.guidance)

    def complete(
        self, model: FlowModel, terms: NoisedTerms, settings: config.Learner, ranks: Ranks
    ) -> NoisedTerms:
        """Weights every group by its preference, under the weights before this update."""
        if self.kl > 0:
            terms = self._with_reference(model, terms, settings, ranks)
        which: list[Which] = ["current", "reference"]
        which += ["old"] if "old" in self.needs else []
        losses = self.matching_losses(model, terms, which, settings, ranks)
        current, reference, *old = losses.cpu().unbind(1)
        advantage, group = terms.advantage.cpu(), terms.group.cpu()
        weights = matching.group_weights(advantage, current, reference, group, self.beta)
        weighted = (weights * advantage).to(terms.row.device)
        return replace(terms, advantage=weighted, old_loss=losses[:, 2] if old else terms.old_loss)

    @torch.no_grad()
    def _with_reference(
        self, model: FlowModel, terms: NoisedTerms, settings: config.Learner, ranks: Ranks
    ) -> NoisedTerms:
        """Adds the velocity under the reference: the preference needs it, and so does the KL."""

        def velocity(part: Tensor) -> Tensor:
            return terms.rows(part).velocity(model, "reference")

        parts = terms.micro_batches(settings)
        found = torch.zeros_like(terms.clean, dtype=torch.float32)
        with model.policy.folded():
            fill(found, parts, [len(part) for part in parts], velocity, ranks)
        return replace(terms, reference=found)


class DGPO(Preference):
    """Direct group preference optimization (arXiv 2510.08425). Defaults are the authors' for
    SD3.5-M with the OCR reward."""

    name: str = "dgpo"
    times: int = Field(4, ge=1)
    last: int | None = Field(6, ge=0)
    kl: float = Field(0.02, ge=0)
    clip: float = Field(1e-2, gt=0)
    """A term has no gradient where exp(L_old − L) has passed 1 ± clip."""
    old_samples_after: int = Field(200, ge=0)
    """Iterations after which the old policy, a slow average, generates the samples."""

    @property
    def needs(self) -> frozenset[Which]:
        return frozenset({"old", "reference"})

    def spec(self, step: int, seed: int, model: config.Model) -> SampleSpec:
        weights: Which = "current" if step < self.old_samples_after else "old"
        return replace(super().spec(step, seed, model), weights=weights)

    def objective(
        self, terms: NoisedTerms, v: Tensor, others: Mapping[Which, Tensor]
    ) -> TermLosses:
        matched = terms.matching_loss(v)
        clipped = matching.beyond(matched, terms.old_loss, terms.advantage, self.clip)
        loss = terms.advantage * torch.where(clipped, matched.detach(), matched)
        return TermLosses(loss, {"matching": matched.detach(), "clipped": clipped.float()})


class FlowDPO(Picked, Preference):
    """Diffusion-DPO (arXiv 2311.12908) for flow models: the best sample of each group is preferred
    to the worst; offline, a row's chosen image to the rejected one. Groups without spread have no
    preference."""

    name: str = "flow-dpo"
    updates: int = Field(1, ge=1)
    times: int = Field(1, ge=1)

    given: ClassVar[tuple[str, ...]] = ("chosen", "rejected")

    def advantages(self, rollout: Rollout) -> Tensor:
        """1 for the best, −1 for the worst, 0 for all others."""
        best, worst = self.extremes(rollout)
        return best.double() - worst.double()

    def objective(
        self, terms: NoisedTerms, v: Tensor, others: Mapping[Which, Tensor]
    ) -> TermLosses:
        """Its gradient is that of −log σ(−S) per pair, where S is the preference's argument."""
        matched = terms.matching_loss(v)
        wrong = terms.advantage.abs().clamp(max=1 - 1e-6)  # σ(S): prefers the worst
        stats = {
            "matching": matched.detach(),
            "preference": -torch.log1p(-wrong),
            "accuracy": (wrong < 0.5).float(),
        }
        return TermLosses(self.beta * terms.advantage * matched, stats)

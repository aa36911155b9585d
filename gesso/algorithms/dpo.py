"""DPO (arXiv 2305.18290) for language models: offline, on the two responses of a row, or online, on
the best and the worst response of a group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from gesso import config
from gesso.algorithms.advantage import BestAndWorst
from gesso.algorithms.base import Prepared
from gesso.algorithms.likelihood import TEMPERATURE, LikelihoodAlgorithm, LikelihoodTerms
from gesso.algorithms.policy_gradient import by_response
from gesso.formulas import dpo
from gesso.models.tokens.base import TokenModel
from gesso.ranks import ALONE, Ranks
from gesso.rollout import Rollout
from gesso.traces.tokens import TokenTrace
from gesso.types import Which


@dataclass(frozen=True)
class PreparedPairs(Prepared):
    reference: Tensor  # (N,): summed log-prob under the reference


class DPO(LikelihoodAlgorithm):
    name: str = "dpo"
    group: int = Field(8, ge=2)
    """Responses per prompt; 2 with `sampler.engine = "data"`."""
    beta: float = Field(0.1, gt=0)
    """Sharpness of a preference; larger values stay closer to the reference."""

    whole_groups: ClassVar[bool] = True
    given: ClassVar[tuple[str, ...]] = ("chosen", "rejected")
    advantage: ClassVar[BestAndWorst] = BestAndWorst()
    reported: ClassVar[tuple[str, ...]] = ("preference", "margin", "accuracy")

    @property
    def needs(self) -> frozenset[Which]:
        return frozenset({"reference"})

    def prepare(
        self, model: TokenModel, rollout: Rollout, settings: config.Learner, ranks: Ranks = ALONE
    ) -> PreparedPairs:
        sign = self.advantage(rollout)
        used = sign.nonzero()[:, 0]
        trace = rollout.token_trace
        reference = torch.zeros(len(sign))
        reference[used] = self._sums(model, trace.rows(used), "reference", settings, ranks)
        return PreparedPairs(sign, reference)

    @torch.no_grad()
    def _sums(
        self,
        model: TokenModel,
        trace: TokenTrace,
        weights: Which,
        settings: config.Learner,
        ranks: Ranks,
    ) -> Tensor:
        """(n,) Σℓ of every response."""

        def logp(part: TokenTrace) -> Tensor:
            return model.logp(part, TEMPERATURE, weights).logp

        with model.policy.folded():
            return by_response(logp, trace, settings, ranks).sum(1)

    def terms(self, rollout: Rollout, prepared: PreparedPairs) -> LikelihoodTerms:
        used = prepared.advantages.nonzero()[:, 0]
        trace = rollout.token_trace.rows(used)
        sign = prepared.advantages[used]
        weights = sign[:, None].float() * trace.mask
        stats = torch.zeros(len(used), len(self.reported))
        total = max(1, len(used) // 2)  # pairs
        group, reference = rollout.group[used], prepared.reference[used]
        return LikelihoodTerms(total, trace, weights, sign, group, reference, stats)

    def complete(
        self, model: TokenModel, terms: LikelihoodTerms, settings: config.Learner, ranks: Ranks
    ) -> LikelihoodTerms:
        """Weights both responses of a pair by its loss under the weights before this update."""
        logp = self._sums(model, terms.trace, "current", settings, ranks)
        pairs = dpo.pairs(logp - terms.reference, terms.sign, terms.group, self.beta)
        weights = pairs.weight.float()[:, None] * terms.trace.mask
        stats = torch.stack([pairs.loss, pairs.margin, (pairs.margin > 0).double()], 1).float()
        return replace(terms, weights=weights, stats=stats)

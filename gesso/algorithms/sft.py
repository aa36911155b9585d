"""Supervised fine-tuning on given responses: mean −ℓ over all tokens of an optimizer step."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from gesso import config
from gesso.algorithms.advantage import Equal
from gesso.algorithms.base import Prepared
from gesso.algorithms.likelihood import LikelihoodAlgorithm, LikelihoodTerms
from gesso.formulas.aggregation import token_weights
from gesso.models.tokens.base import TokenModel
from gesso.ranks import ALONE, Ranks
from gesso.rollout import Rollout


class SFT(LikelihoodAlgorithm):
    name: str = "sft"
    group: int = Field(1, ge=1, le=1)
    """Responses per prompt: the row's."""

    given: ClassVar[tuple[str, ...]] = ("response",)
    advantage: ClassVar[Equal] = Equal()

    def prepare(
        self, model: TokenModel, rollout: Rollout, settings: config.Learner, ranks: Ranks = ALONE
    ) -> Prepared:
        return Prepared(self.advantage(rollout))

    def terms(self, rollout: Rollout, prepared: Prepared) -> LikelihoodTerms:
        mask = rollout.mask
        unused = torch.empty(len(mask), 0)
        weights = token_weights(mask, "token-mean")
        sign = torch.ones(len(mask))
        return LikelihoodTerms(1, rollout.token_trace, weights, sign, rollout.group, unused, unused)

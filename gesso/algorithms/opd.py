"""On-policy distillation for language models: every token of the student's responses is reinforced
by how much likelier the teacher finds it than the student does. No reward is used."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Protocol

import torch
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from gesso import config
from gesso.algorithms.credit import Credit
from gesso.algorithms.policy_gradient import (
    PolicyGradient,
    PreparedResponses,
    ResponseTerms,
    Surrogate,
    Weight,
    by_response,
)
from gesso.config import Strict
from gesso.formulas.objectives import teacher_gap
from gesso.models.tokens.base import TokenModel
from gesso.ranks import ALONE, Ranks
from gesso.rollout import Rollout
from gesso.traces.tokens import TokenTrace
from gesso.types import Which, teacher_name

NAME = teacher_name("teacher")
UNUSED = Credit(baseline="zero", std="one")


class Scorer(Protocol):
    def logp(self, trace: TokenTrace, temperature: float) -> Tensor: ...


class TokenTeacher(Strict):
    """Either another model, or other adapters of the student's."""

    path: str | None = Field(None, min_length=1)
    """A larger model with the student's vocabulary: a folder or a Hugging Face hub name. It is
    loaded in addition to the student, in the same precision."""
    adapter: str | None = Field(None, min_length=1)
    """A LoRA run, its export or a PEFT folder, for the student's base model."""
    step: int | None = Field(None, ge=0)
    """Checkpoint of a run. None: the newest."""
    weights: Literal["ema", "current"] | None = None
    """Weights of a run's checkpoint. None: averaged ones if it has any."""

    @model_validator(mode="after")
    def _one(self) -> TokenTeacher:
        if (self.path is None) == (self.adapter is None):
            raise ValueError("expected one of path (another model) and adapter (a LoRA)")
        if self.path is not None and (self.step is not None or self.weights is not None):
            raise ValueError("step and weights select a checkpoint of an adapter; remove them")
        return self


class OPD(PolicyGradient):
    name: str = "opd"
    group: int = Field(1, ge=1)
    surrogate: Surrogate = Weight()
    advantage: Credit = UNUSED
    """Not used: the teacher gives every token its advantage."""
    teacher: TokenTeacher
    """The teacher."""
    _network: Scorer | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _without_rewards(self) -> OPD:
        if self.advantage != UNUSED:
            raise ValueError("opd does not learn from rewards; remove advantage")
        if self.kl is not None and self.kl.place == "reward":
            raise ValueError('opd does not learn from rewards; use kl.place = "loss"')
        return self

    def with_teacher(self, network: Scorer) -> OPD:
        """A copy of this algorithm that uses another model as its teacher."""
        copy = self.model_copy()
        copy._network = network
        return copy

    @property
    def needs(self) -> frozenset[Which]:
        return super().needs | (frozenset({NAME}) if self.teacher.adapter else frozenset())

    def estimate(
        self,
        model: TokenModel,
        rollout: Rollout,
        penalty: Tensor | None,
        settings: config.Learner,
        ranks: Ranks = ALONE,
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = rollout.logp.new_empty(len(rollout.logp), 0)
        return torch.zeros_like(rollout.logp, dtype=torch.float64), unused, unused

    def prepare(
        self, model: TokenModel, rollout: Rollout, settings: config.Learner, ranks: Ranks = ALONE
    ) -> PreparedResponses:
        prepared = super().prepare(model, rollout, settings, ranks)

        @torch.no_grad()
        def logp(trace: TokenTrace) -> Tensor:
            if self.teacher.adapter:
                return model.logp(trace, self.temperature, NAME).logp
            assert self._network is not None, "call `with_teacher` first"
            return self._network.logp(trace, self.temperature)

        theirs = by_response(logp, rollout.token_trace, settings, ranks)
        return replace(prepared, advantages=teacher_gap(theirs, prepared.old, rollout.mask))

    def further(self, model: TokenModel, terms: ResponseTerms, stats: dict[str, Tensor]) -> Tensor:
        """Reports the KL to the teacher, as estimated from the sampled tokens."""
        stats["distance"] = -terms.trace.select(terms.prepared.advantages).float()
        return super().further(model, terms, stats)

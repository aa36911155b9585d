"""PPO (arXiv 1707.06347) with a critic and generalised advantage estimation."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from gesso import config
from gesso.algorithms.credit import Credit
from gesso.algorithms.policy_gradient import PolicyGradient, ResponseTerms, by_response
from gesso.config import Strict
from gesso.formulas import advantages as adv
from gesso.formulas import objectives
from gesso.models.tokens.base import TokenModel, ValueFunction
from gesso.ranks import ALONE, Ranks
from gesso.rollout import Rollout


class CriticSection(Strict):
    """The value function of PPO."""

    trunk: Literal["copy", "lora"] = "copy"
    """Network under the value head. "copy": a separate one, initialised from the policy. "lora":
    separate adapters in the policy's network, which must be trained with LoRA, too."""
    lr: float = Field(1e-5, ge=0)
    """Learning rate of the critic."""
    clip: float | None = Field(None, gt=0)
    """Maximum change of a value per update. None: unbounded."""


class PPO(PolicyGradient):
    name: str = "ppo"
    group: int = Field(1, ge=1)
    """Responses per prompt."""
    advantage: Credit = Credit(baseline="zero", std="one", per="token", whiten=True)
    """Advantage settings."""
    lam: float = Field(0.95, ge=0, le=1)
    """λ of GAE."""
    critic: CriticSection = CriticSection()
    """Critic settings."""
    _critic: ValueFunction | None = PrivateAttr(None)

    def with_critic(self, critic: ValueFunction) -> PPO:
        """A copy of this algorithm that uses `critic`."""
        copy = self.model_copy()
        copy._critic = critic
        return copy

    @property
    def critic_network(self) -> ValueFunction | None:
        return self._critic

    @model_validator(mode="after")
    def _critic_is_the_baseline(self) -> PPO:
        if (self.advantage.baseline, self.advantage.per) != ("zero", "token"):
            raise ValueError(
                "the critic is the baseline, so PPO requires "
                'advantage.baseline = "zero" and advantage.per = "token"'
            )
        if self.advantage.clip is not None:
            raise ValueError(
                "advantage.clip applies to one advantage per response, and PPO has one per token; "
                "remove advantage.clip"
            )
        return self

    def estimate(
        self,
        model: TokenModel,
        rollout: Rollout,
        penalty: Tensor | None,
        settings: config.Learner,
        ranks: Ranks = ALONE,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self._critic is not None, "call `with_critic` first"
        mask = rollout.mask
        with torch.no_grad():
            values = by_response(self._critic.values, rollout.token_trace, settings, ranks)
        rewards = adv.on_last(rollout.rewards, mask)
        if penalty is not None:
            rewards = rewards - penalty.double()
        estimate = adv.gae(rewards, values, mask, self.advantage.gamma, self.lam)
        advantages = estimate.advantages
        if self.advantage.whiten:
            advantages = adv.whiten(advantages, mask)
        return advantages, values, estimate.returns

    def further(self, model: TokenModel, terms: ResponseTerms, stats: dict[str, Tensor]) -> Tensor:
        """The value loss. Critic and policy share no trained weights, so the two losses need no
        coefficient."""
        assert self._critic is not None, "call `with_critic` first"
        prepared, select = terms.prepared, terms.trace.select
        values = self._critic.values(terms.trace)
        loss = objectives.value_loss(values, prepared.values, prepared.returns, self.critic.clip)
        error = select(values.detach() - prepared.returns)
        stats |= {"value": select(values.detach()), "value_error": error.abs()}
        return (terms.weights * loss).sum(1)

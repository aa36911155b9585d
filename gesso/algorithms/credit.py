"""Token advantages, computed from the rewards of responses.

Published methods differ in three choices: the baseline, the divisor, and whether all tokens of a
response share one advantage or each token has the discounted sum from there on.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from gesso.config import Strict
from gesso.formulas import advantages as adv
from gesso.rollout import Rollout

EPSILON = 1e-6  # as in the reference code for tokens; flow models use 1e-4


def _per(value: Any) -> Any:
    """Accepts "reply", which runs of earlier versions have in their config.toml."""
    return "response" if value == "reply" else value


class Credit(Strict):
    """Advantages of responses and of their tokens."""

    baseline: Literal["mean", "others", "greedy", "zero"] = "mean"
    """Baseline: the group "mean", the mean of the "others", the "greedy" response, or "zero"."""
    std: Literal["group", "global", "one"] = "group"
    """Divide by the standard deviation of the "group", of the batch ("global"), or by "one"."""
    combine: Literal["sum", "gdpo"] = "sum"
    """How several rewards are combined: "sum" or "gdpo", as for flow models."""
    clip: float | None = Field(None, gt=0)
    """Clip a response's advantage to ± clip."""
    per: Annotated[Literal["response", "token"], BeforeValidator(_per)] = "response"
    """"response": all tokens share its advantage, and a KL in the reward is subtracted before
    normalisation. "token": the reward is on the last token, a KL on its own token, and each token
    gets the discounted sum from there on."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token."""
    whiten: bool = False
    """Normalise to mean 0 and variance 1 over all tokens of the batch."""
    drop_flat: bool = False
    """Drop groups without reward spread, also from the denominator."""
    flat_by: str | None = None
    """Reward whose spread decides about `drop_flat`. None: the total. DAPO uses accuracy."""

    @model_validator(mode="after")
    def _possible(self) -> Credit:
        if self.baseline != "mean" and self.std != "one":
            raise ValueError(f'std = "{self.std}" requires baseline = "mean"; use std = "one"')
        if self.combine == "gdpo" and (self.baseline, self.std) != ("mean", "group"):
            raise ValueError('combine = "gdpo" requires baseline = "mean" and std = "group"')
        if self.flat_by is not None and not self.drop_flat:
            raise ValueError("flat_by has no effect without drop_flat; set drop_flat = true")
        if self.gamma != 1 and self.per == "response":
            raise ValueError('gamma discounts from token to token; it requires per = "token"')
        return self

    @property
    def compares(self) -> bool:
        """Whether a response is compared with the other responses to its prompt."""
        return self.baseline in ("mean", "others")

    def __call__(self, rollout: Rollout, penalty: Tensor | None = None) -> Tensor:
        """(N, S) float64, 0 outside the responses. penalty: (N, S) β·KL of each token."""
        mask = rollout.mask
        rewards = rollout.rewards
        if penalty is not None and self.per == "response":
            rewards = rewards - penalty.double().sum(1)
        of_responses = self._of_responses(rollout, rewards)
        if self.clip is not None:
            of_responses = of_responses.clamp(-self.clip, self.clip)
        if self.per == "response":
            advantages = torch.where(mask, of_responses[:, None], 0.0)
        else:
            advantages = adv.on_last(of_responses, mask)
            if penalty is not None:
                advantages = advantages - penalty.double()
            advantages = adv.to_go(advantages, mask, self.gamma)
        return adv.whiten(advantages, mask) if self.whiten else advantages

    def _of_responses(self, rollout: Rollout, rewards: Tensor) -> Tensor:
        """(N,): one advantage per response."""
        group = rollout.group
        if self.combine == "gdpo":
            weights = torch.tensor(list(rollout.weights.values()), dtype=torch.float64)
            return adv.gdpo(rollout.components, weights, group)
        if self.baseline == "mean":
            std = "none" if self.std == "one" else self.std
            return adv.group_relative(rewards, group, std, correction=1, epsilon=EPSILON)
        if self.baseline == "others":
            return adv.leave_one_out(rewards, group)
        if self.baseline == "greedy":
            assert rollout.greedy is not None, "the cluster samples greedy responses for this"
            return rewards - rollout.greedy
        return rewards

    def kept(self, rollout: Rollout, multiple: int) -> Tensor:
        if not self.drop_flat:
            return torch.arange(len(rollout.samples))
        rewards = rollout.components if self.combine == "gdpo" else rollout.rewards[:, None]
        if self.flat_by is not None:
            column = list(rollout.weights).index(self.flat_by)
            rewards = rollout.components[:, column : column + 1]
        return adv.with_spread(rewards, rollout.group, multiple)

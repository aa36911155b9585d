"""How the rewards of replies become the advantages of their tokens.

Three choices cover the field: what a reward is compared with, what it is divided by, and whether a
reply has one advantage or each token the sum of what comes after it.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gesso.config import Strict
from gesso.formulas import advantages as adv
from gesso.rollout import Rollout

EPSILON = 1e-6  # of the reference codes for tokens; flow models have 1e-4


class Credit(Strict):
    """baseline: `mean` of the group, the mean of the `others` in it, the prompt's `greedy` reply,
    or `zero`. std: what the difference is divided by. per: with `reply` all tokens of a reply have
    its advantage, and a KL in the reward is summed into that before the statistics; with `token`
    the advantage stands on the last token, a KL is taken off at its own token, and every token has
    the sum from there on, discounted by gamma."""

    baseline: Literal["mean", "others", "greedy", "zero"] = "mean"
    std: Literal["group", "global", "one"] = "group"
    combine: Literal["sum", "gdpo"] = "sum"  # as in algorithms/advantage.py
    clip: float | None = Field(None, gt=0)  # of a reply's advantage
    per: Literal["reply", "token"] = "reply"
    gamma: float = Field(1.0, gt=0, le=1)
    whiten: bool = False  # over all tokens of the batch
    drop_flat: bool = False  # groups without spread leave the batch and its denominator
    flat_by: str | None = None  # the reward whose spread counts for that; None: the whole

    @model_validator(mode="after")
    def _possible(self) -> Credit:
        if self.baseline != "mean" and self.std != "one":
            raise ValueError(f'std = "{self.std}" goes with baseline = "mean"; use std = "one"')
        if self.combine == "gdpo" and (self.baseline, self.std) != ("mean", "group"):
            raise ValueError('combine = "gdpo" has baseline = "mean" and std = "group"')
        if self.flat_by is not None and not self.drop_flat:
            raise ValueError("flat_by says which groups drop_flat drops; set drop_flat = true")
        if self.gamma != 1 and self.per == "reply":
            raise ValueError('gamma discounts from token to token; it needs per = "token"')
        return self

    def __call__(self, rollout: Rollout, penalty: Tensor | None = None) -> Tensor:
        """(N, S) float64, 0 outside the replies. penalty: (N, S) β·KL of each token."""
        mask = rollout.mask
        rewards = rollout.rewards.to(mask.device)
        if penalty is not None and self.per == "reply":
            rewards = rewards - penalty.double().sum(1)
        found = self._of_replies(rollout, rewards)
        if self.clip is not None:
            found = found.clamp(-self.clip, self.clip)
        if self.per == "reply":
            found = torch.where(mask, found[:, None], 0.0)
        else:
            found = adv.on_last(found, mask)
            if penalty is not None:
                found = found - penalty.double()
            found = adv.to_go(found, mask, self.gamma)
        return adv.whiten(found, mask) if self.whiten else found

    def _of_replies(self, rollout: Rollout, rewards: Tensor) -> Tensor:
        """(N,)"""
        group = rollout.group.to(rewards.device)
        if self.combine == "gdpo":
            weights = torch.tensor(list(rollout.weights.values()), dtype=torch.float64)
            return adv.gdpo(rollout.components, weights, rollout.group).to(rewards.device)
        if self.baseline == "mean":
            std = "none" if self.std == "one" else self.std
            return adv.group_relative(rewards, group, std, correction=1, epsilon=EPSILON)
        if self.baseline == "others":
            return adv.leave_one_out(rewards, group)
        if self.baseline == "greedy":
            assert rollout.greedy is not None, "the cluster draws it for whoever asks"
            return rewards - rollout.greedy.to(rewards.device)
        return rewards

    def kept(self, rollout: Rollout, multiple: int) -> Tensor:
        if not self.drop_flat:
            return torch.arange(len(rollout.samples))
        rewards = rollout.components if self.combine == "gdpo" else rollout.rewards[:, None]
        if self.flat_by is not None:
            place = list(rollout.weights).index(self.flat_by)
            rewards = rollout.components[:, place : place + 1]
        return adv.with_spread(rewards, rollout.group, multiple)

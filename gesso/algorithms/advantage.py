"""How an algorithm turns rewards into advantages: the same few choices for every family."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from gesso.config import Strict
from gesso.formulas import advantages as adv
from gesso.rollout import Rollout


class Advantage(Strict):
    """`combine = "sum"`: the weighted sum of the rewards, centred in its group. `"gdpo"`: each
    reward normalised in its group, summed by weight, normalised over the batch."""

    combine: Literal["sum", "gdpo"] = "sum"
    std: Literal["global", "group"] = "global"  # what a sum is divided by
    clip: float = Field(5.0, gt=0)
    drop_flat: bool = False  # samples whose advantage is 0 leave the batch and its denominator

    def __call__(self, rollout: Rollout) -> Tensor:
        """(N,) float64, within ± clip."""
        if self.combine == "gdpo":
            weights = torch.tensor(list(rollout.weights.values()), dtype=torch.float64)
            found = adv.gdpo(rollout.components, weights, rollout.group)
        else:
            found = adv.group_relative(rollout.rewards, rollout.group, self.std)
        return found.clamp(-self.clip, self.clip)

    def kept(self, rollout: Rollout, multiple: int) -> Tensor:
        """Indices of the samples to train on, as many as can be split into `multiple` parts."""
        if not self.drop_flat:
            return torch.arange(len(rollout.samples))
        if self.combine == "gdpo":  # centred over the batch: that of a flat group is not exactly 0
            return adv.with_spread(rollout.components, rollout.group, multiple)
        return adv.nonzero(self(rollout), multiple)

"""Advantages of the flow algorithms, computed from rewards."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from gesso.config import Strict
from gesso.formulas import advantages as adv
from gesso.formulas import diversity
from gesso.rollout import Rollout


class Advantage(Strict):
    """`combine = "sum"`: the weighted sum of the rewards, centred in its group. `"gdpo"`: each
    reward normalised in its group, summed by weight, normalised over the batch."""

    combine: Literal["sum", "gdpo"] = "sum"
    """How several rewards are combined. "sum": add the weighted rewards, then normalise. "gdpo":
    normalise each reward within its group first, so that no reward dominates."""
    std: Literal["global", "group", "one"] = "global"
    """Divide by the standard deviation of the whole batch ("global"), of the group ("group"), or by
    "one"."""
    diverse: bool = False
    """GARDO: multiply positive advantages by how far a sample is from the others of its group,
    relative to their mean. Distances are 1 − cosine of the clean latents; the paper's are of DINOv3
    features."""
    clip: float = Field(5.0, gt=0)
    """Advantages are clipped to ± clip."""
    drop_flat: bool = False
    """Drop samples with zero advantage (above all groups without reward spread) from the loss, the
    KL and the denominator."""

    @property
    def compares(self) -> bool:
        """Whether a sample is compared with the other samples of its prompt."""
        return True

    def __call__(self, rollout: Rollout) -> Tensor:
        """(N,) float64, within ± clip."""
        if self.combine == "gdpo":
            weights = torch.tensor(list(rollout.weights.values()), dtype=torch.float64)
            advantages = adv.gdpo(rollout.components, weights, rollout.group)
        else:
            std = "none" if self.std == "one" else self.std
            advantages = adv.group_relative(rollout.rewards, rollout.group, std)
        if self.diverse:
            isolation = diversity.isolation(rollout.flow_trace.clean, rollout.group)
            advantages = adv.diverse(advantages, isolation, rollout.group)
        return advantages.clamp(-self.clip, self.clip)

    def kept(self, rollout: Rollout, multiple: int) -> Tensor:
        """Indices of the samples to train on; their number is divisible by `multiple`."""
        if not self.drop_flat:
            return torch.arange(len(rollout.samples))
        if self.combine == "gdpo":  # centred over the batch: not exactly 0 in a flat group
            return adv.with_spread(rollout.components, rollout.group, multiple)
        return adv.nonzero(self(rollout), multiple)


class Equal(Strict):
    """Every sample counts the same: of algorithms that do not learn from rewards."""

    compares: ClassVar[bool] = False
    drop_flat: ClassVar[bool] = False

    def __call__(self, rollout: Rollout) -> Tensor:
        """(N,) ones."""
        return torch.ones(len(rollout.samples), dtype=torch.float64)

    def kept(self, rollout: Rollout, multiple: int) -> Tensor:
        return torch.arange(len(rollout.samples))


class BestAndWorst(Strict):
    """1 for the best sample of each group with spread, −1 for the worst, 0 for all others."""

    compares: ClassVar[bool] = True
    drop_flat: ClassVar[bool] = False

    def __call__(self, rollout: Rollout) -> Tensor:
        """(N,) float64."""
        best, worst = adv.extremes(rollout.rewards, rollout.group)
        return best.double() - worst.double()

    def kept(self, rollout: Rollout, multiple: int) -> Tensor:
        return torch.arange(len(rollout.samples))

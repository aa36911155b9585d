"""DRaFT-K (arXiv 2309.17400): the gradient of the reward through the last K denoising steps."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field, model_validator
from torch import Tensor

from gesso.algorithms.reward_gradient import PathTerms, RewardGradient
from gesso.formulas import reward_gradient


class DRaFT(RewardGradient):
    name: str = "draft"
    k: int = Field(1, ge=1)
    """Denoising steps with gradient, counted from the last."""

    @model_validator(mode="after")
    def _enough_steps(self) -> DRaFT:
        if self.k > self.steps:
            raise ValueError(f"k = {self.k} exceeds the {self.steps} steps")
        return self

    @property
    def recorded(self) -> range:
        return range(self.steps - self.k, self.steps)

    def places(self, chance: random.Random) -> Sequence[int]:
        return [self.recorded.start]

    def path(self, velocity: reward_gradient.Velocity, terms: PathTerms) -> tuple[Tensor, float]:
        levels = [s.expand(len(terms)) for s in terms.context.sigmas[self.recorded.start :]]
        return reward_gradient.draft(velocity, terms.states[:, 0], levels), 1.0

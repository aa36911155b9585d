"""ReFL (arXiv 2304.05977): the gradient of the reward of a clean sample that is predicted in one
random step. Steps and range are those of a public implementation for SD3.5-M."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field, model_validator
from torch import Tensor

from gesso import config
from gesso.algorithms.reward_gradient import PathTerms, RewardGradient
from gesso.formulas import reward_gradient


class ReFL(RewardGradient):
    name: str = "refl"
    steps: int = Field(25, ge=1, le=config.MAX_STEPS)
    low: int = Field(14, ge=0)
    """First step that may be drawn, up to the last step of all."""

    @model_validator(mode="after")
    def _some_step(self) -> ReFL:
        if self.low >= self.steps:
            raise ValueError(f"low = {self.low} must be less than steps = {self.steps}")
        return self

    @property
    def recorded(self) -> range:
        return range(self.low, self.steps)

    def places(self, chance: random.Random) -> Sequence[int]:
        return [chance.choice(self.recorded)]

    def path(self, velocity: reward_gradient.Velocity, terms: PathTerms) -> tuple[Tensor, float]:
        return reward_gradient.refl(velocity, terms.states[:, 0], terms.sigmas[:, 0]), 1.0

"""LeapAlign (arXiv 2604.15311): the gradient of the reward through two long steps between random
states of a sampled path. Defaults are those of a public implementation."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field
from torch import Tensor

from gesso import config
from gesso.algorithms.reward_gradient import PathTerms, RewardGradient
from gesso.formulas import reward_gradient


class LeapAlign(RewardGradient):
    name: str = "leap-align"
    steps: int = Field(25, ge=2, le=config.MAX_STEPS)
    inner: float = Field(0.3, ge=0, le=1)
    """Factor of the gradient through the input of the second step (α)."""
    floor: float = Field(0.1, gt=0)
    """Distances between predicted and sampled states count at least this much (τ)."""

    @property
    def recorded(self) -> range:
        return range(self.steps)

    def places(self, chance: random.Random) -> Sequence[int]:
        """Two different steps, in order."""
        return sorted(chance.sample(self.recorded, 2))

    def path(self, velocity: reward_gradient.Velocity, terms: PathTerms) -> tuple[Tensor, Tensor]:
        states = terms.states[:, 0], terms.states[:, 1], terms.clean
        sigmas = terms.sigmas[:, 0], terms.sigmas[:, 1]
        leap = reward_gradient.leap_align(velocity, states, sigmas, self.inner, self.floor)
        return leap.clean, leap.weight

"""Base class of the algorithms that differentiate the reward: sampled states are denoised again
with gradient, decoded and scored in the learner's process."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gesso import config
from gesso.algorithms.advantage import Equal
from gesso.algorithms.base import Prepared, TermLosses
from gesso.algorithms.flow import AnyFlowAlgorithm, FlowTerms, ode_spec
from gesso.formulas.reward_gradient import Velocity, hinge
from gesso.models.flow.base import FlowModel
from gesso.models.flow.guidance import guided
from gesso.ranks import ALONE, Ranks
from gesso.rollout import Rollout
from gesso.traces.flow import Conditioning
from gesso.types import GuidanceGradient, Prompt, SampleSpec, Which, seed_of
from gesso.weights.policy import Policy

Reward = Callable[[Tensor, Sequence[Prompt]], Tensor]
"""(N, 3, height, width) in [0, 1] and N prompts → (N,), with gradient."""


class DecodingModel(FlowModel, Protocol):
    def images(self, latents: Tensor, cond: Conditioning) -> Tensor:
        """(N, C, H, W) → (N, 3, height, width) float32 in [0, 1], with gradient."""


@dataclass(frozen=True)
class PathTerms(FlowTerms):
    """Each term is one sample, with the sampled states where its path begins or passes."""

    prompts: Sequence[Prompt]  # of the mini-batch
    sample: Tensor  # (T,): term → prompt
    steps: Tensor  # (T, m) long: indices of the schedule
    states: Tensor  # (T, m, C, H, W): latents there
    clean: Tensor  # (T, C, H, W)

    @property
    def sigmas(self) -> Tensor:
        """(T, m)"""
        return self.context.sigmas[self.steps]


class RewardGradient(AnyFlowAlgorithm):
    group: int = Field(1, ge=1)
    updates: int = Field(1, ge=1)
    steps: int = Field(10, ge=1, le=config.MAX_STEPS)
    """Denoising steps in training, without noise."""
    guidance: float = Field(1.0, ge=0)
    """Classifier-free guidance scale, in sampling and in the update; it multiplies the gradient."""
    guidance_gradient: GuidanceGradient = "both"
    """Branches that are differentiated: "both" or "conditional"."""
    hinge: float | None = None
    """Samples with a reward above it have no gradient. None: all samples have one."""

    advantage: ClassVar[Equal] = Equal()
    needs: ClassVar[frozenset[Which]] = frozenset()
    terms_a_sample: ClassVar[int] = 1
    clip_range: ClassVar[None] = None
    _reward: Reward | None = PrivateAttr(None)

    def with_reward(self, reward: Reward) -> RewardGradient:
        """A copy of this algorithm that maximises `reward`."""
        copy = self.model_copy()
        copy._reward = reward
        return copy

    @property
    @abstractmethod
    def recorded(self) -> range:
        """Steps whose states are recorded."""

    @abstractmethod
    def places(self, chance: random.Random) -> Sequence[int]:
        """Those of a sample's path, out of the recorded steps."""

    @abstractmethod
    def path(self, velocity: Velocity, terms: PathTerms) -> tuple[Tensor, Tensor | float]:
        """Clean latents with gradient, and the weights of the samples."""

    def spec(self, step: int, seed: int, model: config.Model) -> SampleSpec:
        """Flow-SDE without noise is the Euler step, and its states are recorded."""
        return replace(
            ode_spec(model, self.steps),
            stochastic=self.recorded,
            trained=self.recorded,
            guidance=self.guidance,
        )

    def prepare(
        self, model: FlowModel, rollout: Rollout, settings: config.Learner, ranks: Ranks = ALONE
    ) -> Prepared:
        return Prepared(self.advantage(rollout))

    def terms(self, rollout: Rollout, prepared: Prepared) -> PathTerms:
        trace, n = rollout.flow_trace, len(rollout.samples)
        rows = torch.arange(n, device=trace.row.device)
        chosen = [
            list(self.places(random.Random(seed_of(sample.seed, "path"))))
            for sample in rollout.samples
        ]
        steps = torch.tensor(chosen, dtype=torch.long, device=trace.row.device)
        return PathTerms(
            context=trace.context,
            total=n,
            row=trace.row,
            prompts=[sample.prompt for sample in rollout.samples],
            sample=rows,
            steps=steps,
            states=trace.latents[rows[:, None], steps - self.recorded.start],
            clean=trace.clean,
        )

    def loss(self, model: DecodingModel, terms: PathTerms) -> TermLosses:
        assert self._reward is not None, "call `with_reward` first"
        cond = terms.context.cond.rows(terms.row)
        negatives = terms.context.negative
        negative = None if negatives is None else negatives.rows(terms.row)

        def velocity(x: Tensor, sigma: Tensor) -> Tensor:
            branches = model, x, sigma, cond, negative, self.guidance
            return guided(*branches, gradient=self.guidance_gradient).velocity

        def saved_input(x: Tensor, sigma: Tensor) -> Tensor:
            """Stores only x; backward runs the network again."""
            v: Tensor = checkpoint(velocity, x, sigma, use_reentrant=False)
            return v

        clean, weight = self.path(saved_input, terms)
        prompts = [terms.prompts[i] for i in terms.sample.tolist()]
        reward = self._reward(model.images(clean, cond), prompts)
        return TermLosses(weight * hinge(reward, self.hinge), {"reward": reward.detach()})

    def with_kl(self, factor: float) -> None:
        """There is no KL."""

    def finish(self, policy: Policy, optimizer_steps: int) -> None:
        """There are no other weights."""

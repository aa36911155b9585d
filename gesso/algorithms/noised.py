"""Base class of the algorithms that train on clean samples, which they noise again: no trajectory,
no log-probs of denoising steps, and any solver.

A subclass defines the objective of a term from its velocity, and which other weights it compares
that with.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gesso import config
from gesso.algorithms.base import Prepared, TermLosses
from gesso.algorithms.flow import FlowAlgorithm, FlowTerms, ode_spec
from gesso.algorithms.gardo import gated, kl_shares
from gesso.formulas import advantages as adv
from gesso.formulas import averages, matching
from gesso.models.flow.base import FlowModel
from gesso.ranks import ALONE, Ranks, fill
from gesso.rollout import Rollout
from gesso.traces.flow import FlowContext
from gesso.types import SampleSpec, Solver, Which, seed_of
from gesso.weights.policy import Policy


@dataclass(frozen=True)
class PreparedNoised(Prepared):
    old_loss: Tensor  # (N, times): matching loss before the first update


@dataclass(frozen=True)
class NoisedTerms(FlowTerms):
    """Each term is one clean sample, noised to one time. The terms of a sample are adjacent."""

    clean: Tensor  # (T, C, H, W)
    noise: Tensor  # (T, C, H, W)
    t: Tensor  # (T,)
    advantage: Tensor  # (T,) float64
    group: Tensor  # (T,): a number for each prompt and noise level
    old_loss: Tensor  # (T,): matching loss under older weights; (T, 0) if it is not needed
    kl_share: Tensor  # (T,): factor of the distance to the reference
    reference: Tensor | None = None  # (T, C, H, W): velocity under the reference, if it is known

    @property
    def x_t(self) -> Tensor:
        return matching.noised(self.clean, self.noise, self.t)

    def velocity(self, model: FlowModel, weights: Which = "current") -> Tensor:
        """The velocity without guidance."""
        if weights == "reference" and self.reference is not None:
            return self.reference
        return model.velocity(self.x_t, self.t, self.context.cond.rows(self.row), weights)

    def matching_loss(self, v: Tensor) -> Tensor:
        """(T,)"""
        return matching.loss(v, self.clean, self.noise)


class NoisedAlgorithm(FlowAlgorithm):
    steps: int = Field(10, ge=1, le=config.MAX_STEPS)
    """Denoising steps in training, without noise."""
    times: int = Field(9, ge=1)
    """Noise levels trained per sample, out of the sampler's."""
    first: int = Field(0, ge=0)
    """First step whose noise level may be trained."""
    last: int | None = Field(None, ge=0)
    """Last step whose noise level may be trained. None: the last step of all."""
    solver: Solver = "dpm2"
    """ODE solver: "dpm2" (second order) or "euler"."""
    kl: float = Field(0.0, ge=0)
    """Weight of mean (v − v_ref)²."""

    @model_validator(mode="after")
    def _enough_levels(self) -> NoisedAlgorithm:
        if self.levels.stop > self.steps or not self.levels:
            raise ValueError(
                f"first = {self.first} and last = {self.levels.stop - 1} must be among the "
                f"{self.steps} steps, counted from 0, first <= last"
            )
        if self.without_replacement and self.times > len(self.levels):
            raise ValueError(
                f"times = {self.times} must be at most {len(self.levels)}, the number of steps "
                "that may be trained; trained times are sampled from them without replacement"
            )
        return self

    without_replacement: ClassVar[bool] = True  # of the sampler's noise levels

    @property
    def levels(self) -> range:
        """Steps whose noise levels may be trained."""
        return range(self.first, self.steps if self.last is None else self.last + 1)

    @property
    def compared(self) -> frozenset[Which]:
        """Weights other than the current and the reference's whose velocity the objective uses."""
        return frozenset()

    @property
    def needs(self) -> frozenset[Which]:
        return frozenset(self._others)

    @property
    def _others(self) -> list[Which]:
        """All weights whose velocity the loss uses, except the current ones."""
        reference: set[Which] = {self.kl_reference} if self.kl > 0 else set()
        return sorted(self.compared | reference)

    @property
    def terms_a_sample(self) -> int:
        return self.times

    @property
    def clip_range(self) -> float | None:
        return None

    @property
    def needs_old_loss(self) -> bool:
        """Whether terms have the matching loss before the first update."""
        return False

    def spec(self, step: int, seed: int, model: config.Model) -> SampleSpec:
        return replace(ode_spec(model, self.steps), solver=self.solver)

    def prepare(
        self, model: FlowModel, rollout: Rollout, settings: config.Learner, ranks: Ranks = ALONE
    ) -> Prepared:
        prepared = Prepared(self.advantages(rollout), **gated(self.gate, rollout))
        if not self.needs_old_loss:
            return prepared
        terms = self.terms(rollout, prepared)
        loss = self.matching_losses(model, terms, ["current"], settings, ranks)
        old_loss = loss.view(-1, self.times).to(prepared.advantages.device)
        return PreparedNoised(
            prepared.advantages, old_loss, kl_share=prepared.kl_share, metrics=prepared.metrics
        )

    def advantages(self, rollout: Rollout) -> Tensor:
        """(N,) float64."""
        return self.advantage(rollout)

    def terms(self, rollout: Rollout, prepared: Prepared) -> NoisedTerms:
        trace, n, times = rollout.flow_trace, len(rollout.samples), self.times
        device, shape = trace.row.device, trace.clean.shape[1:]
        places, noise = torch.empty(n, times), torch.empty(n, times, *shape)
        for i, seed in enumerate(self._noise_seeds(rollout)):
            generator = torch.Generator().manual_seed(seed_of(seed, "noising"))
            places[i] = self.draw_places(generator)
            noise[i].normal_(generator=generator)
        old_loss = torch.empty(n * times, 0)
        if isinstance(prepared, PreparedNoised):
            old_loss = prepared.old_loss.flatten()
        level = torch.arange(times).repeat(n)
        return NoisedTerms(
            context=trace.context,
            total=n * times,
            row=trace.row.repeat_interleave(times),
            clean=trace.clean.repeat_interleave(times, 0),
            noise=noise.flatten(0, 1).to(device),
            t=self.times_at(trace.context, places.flatten().to(device)),
            advantage=prepared.advantages.double().to(device).repeat_interleave(times),
            group=(rollout.group.repeat_interleave(times) * times + level).to(device),
            old_loss=old_loss.to(device),
            kl_share=kl_shares(prepared.kl_share, trace.row, times),
        )

    def _noise_seeds(self, rollout: Rollout) -> Sequence[int]:
        """N: noise and times depend only on a sample's seed, not on how the batch is split. Where
        whole groups are trained, their samples are compared at the same noise and times."""
        seeds = [sample.seed for sample in rollout.samples]
        if not self.whole_groups:
            return seeds
        groups, lowest = rollout.group.tolist(), dict[int, int]()
        for group, seed in zip(groups, seeds, strict=True):
            lowest[group] = min(seed, lowest.get(group, seed))
        return [lowest[group] for group in groups]

    def draw_places(self, generator: torch.Generator) -> Tensor:
        """(times,) places in the sampler's schedule: some of `levels`, without replacement."""
        order = torch.rand(len(self.levels), generator=generator).argsort()[: self.times]
        return order + self.first

    def times_at(self, context: FlowContext, places: Tensor) -> Tensor:
        """t of places drawn by `draw_places`."""
        return matching.on_schedule(context.sigmas, places)

    @torch.no_grad()
    def matching_losses(
        self,
        model: FlowModel,
        terms: NoisedTerms,
        which: Sequence[Which],
        settings: config.Learner,
        ranks: Ranks,
    ) -> Tensor:
        """(T, len(which)): of all terms under several weights, without gradient. Ranks divide the
        passes."""

        def losses(part: Tensor) -> Tensor:
            own = terms.rows(part)
            return torch.stack([own.matching_loss(own.velocity(model, w)) for w in which], 1)

        found = torch.zeros(len(terms), len(which), device=terms.row.device)
        parts = terms.micro_batches(settings)
        with model.policy.folded():
            fill(found, parts, [len(part) for part in parts], losses, ranks)
        return found

    @abstractmethod
    def objective(
        self, terms: NoisedTerms, v: Tensor, others: Mapping[Which, Tensor]
    ) -> TermLosses:
        """The loss of each term, without the distance to the reference. `others`: velocities of
        the `compared` weights."""

    def loss(self, model: FlowModel, terms: NoisedTerms) -> TermLosses:
        with torch.no_grad():  # before the pass that saves activations for backward
            others = {which: terms.velocity(model, which) for which in self._others}
        v = terms.velocity(model)
        result = self.objective(terms, v, others)
        if self.kl == 0:
            return result
        distance = matching.distance(v, others[self.kl_reference])
        loss = result.loss + self.kl * terms.kl_share * distance
        return TermLosses(loss, {**result.stats, "kl": distance.detach()})

    def with_kl(self, factor: float) -> NoisedAlgorithm | None:
        return self.model_copy(update={"kl": self.kl * factor}) if self.kl > 0 else None

    def old_decay(self, optimizer_steps: int) -> float:
        """d in old ← d·old + (1−d)·θ after an iteration."""
        return averages.rising_decay(optimizer_steps, 0.3)

    def finish(self, policy: Policy, optimizer_steps: int) -> None:
        if "old" in self.needs:
            decay = self.old_decay(optimizer_steps)
            averages.blend_(policy.copies["old"], policy.tensors(), decay)


class PretrainingTimes(NoisedAlgorithm):
    """Trains at the times of pretraining: t of u = sigmoid(N(0, 1)), shifted as the sampler's
    schedule is."""

    without_replacement: ClassVar[bool] = False

    @model_validator(mode="after")
    def _all_levels(self) -> PretrainingTimes:
        if self.first or self.last is not None:
            raise ValueError(f"{self.name} trains at all noise levels; remove first and last")
        return self

    def draw_places(self, generator: torch.Generator) -> Tensor:
        """u = sigmoid(N(0, 1)): places in the schedule before its shift."""
        return torch.randn(self.times, generator=generator).sigmoid()

    def times_at(self, context: FlowContext, places: Tensor) -> Tensor:
        fine = context.fine
        assert fine is not None, "the sampler sets it"
        return matching.on_schedule(fine, (1 - places) * (len(fine) - 1)).clamp(1e-4, 1 - 1e-4)


class Picked(PretrainingTimes):
    """Trains only on samples with an advantage other than 0."""

    @model_validator(mode="after")
    def _with_spread(self) -> Picked:
        if self.advantage.drop_flat:
            raise ValueError(f"{self.name} drops groups without spread; remove advantage.drop_flat")
        return self

    def extremes(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """(N,) bool each: the best and the worst sample of each group with spread."""
        unclipped = self.advantage.model_copy(update={"clip": math.inf})
        return adv.extremes(unclipped(rollout), rollout.group)

    def prepare(
        self, model: FlowModel, rollout: Rollout, settings: config.Learner, ranks: Ranks = ALONE
    ) -> Prepared:
        prepared = super().prepare(model, rollout, settings, ranks)
        return replace(prepared, picked=prepared.advantages != 0)

    def terms(self, rollout: Rollout, prepared: Prepared) -> NoisedTerms:
        used = prepared.advantages.nonzero()[:, 0]
        return super().terms(rollout.rows(used), prepared.rows(used))

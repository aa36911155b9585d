"""DiffusionNFT (arXiv 2509.16117): trains on the forward process, from clean samples and rewards.

No trajectory, no log-prob, no guidance: an ODE under a slowly updated *old* policy generates the
samples, and the loss moves the velocity towards good samples and away from bad ones. Most defaults
are the authors' for SD3.5-M; the recipes contain all of their settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gesso import config
from gesso.algorithms.base import Prepared, TermLosses
from gesso.algorithms.flow import FlowAlgorithm, FlowTerms
from gesso.formulas import averages, nft
from gesso.models.flow.base import FlowModel
from gesso.rollout import Rollout
from gesso.types import SampleSpec, Solver, Which, seed_of
from gesso.weights.policy import Policy


@dataclass(frozen=True)
class NoisedTerms(FlowTerms):
    """Each term is one clean sample, noised to one time."""

    clean: Tensor  # (T, C, H, W)
    noise: Tensor  # (T, C, H, W)
    t: Tensor  # (T,)
    optimal: Tensor  # (T,): probability of being a good sample


class DiffusionNFT(FlowAlgorithm):
    name: str = "diffusion-nft"
    steps: int = Field(10, ge=1, le=config.MAX_STEPS)
    """Denoising steps in training, by the old policy, without noise or guidance."""
    times: int = Field(9, ge=1)
    """Noise levels trained per sample, out of the sampler's."""
    beta: float = Field(0.1, gt=0)
    """Distance of the two mixture policies from the old policy."""
    kl: float = Field(1e-4, ge=0)
    """Weight of mean (v − v_ref)²."""
    decay: Literal[1, 2] = 1
    """Decay schedule of the old policy, see the formulas page."""
    solver: Solver = "dpm2"
    """ODE solver: "dpm2" (second order) or "euler"."""

    @model_validator(mode="after")
    def _possible(self) -> DiffusionNFT:
        if self.times > self.steps:
            raise ValueError(
                f"times = {self.times} must be at most steps = {self.steps}; "
                "trained times are sampled from the steps without replacement"
            )
        return self

    @property
    def needs(self) -> frozenset[Which]:
        return frozenset({"old", "reference"} if self.kl > 0 else {"old"})

    @property
    def terms_a_sample(self) -> int:
        return self.times

    @property
    def clip_range(self) -> float | None:
        return None

    def spec(self, step: int, seed: int, model: config.Model) -> SampleSpec:
        return SampleSpec(
            steps=self.steps,
            height=model.height,
            width=model.width,
            solver=self.solver,
            weights="old",
        )

    def terms(self, rollout: Rollout, prepared: Prepared) -> NoisedTerms:
        trace = rollout.flow_trace
        n, times, device = len(trace.row), self.times, trace.row.device
        shape = trace.clean.shape[1:]
        index, noise = zip(*(self._noising(s.seed, shape) for s in rollout.samples), strict=True)
        optimal = nft.optimality(prepared.advantages, self.advantage.clip).float().to(device)
        return NoisedTerms(
            context=trace.context,
            total=n * times,
            row=trace.row.repeat_interleave(times),
            clean=trace.clean.repeat_interleave(times, 0),
            noise=torch.cat(noise).to(device),
            t=trace.context.sigmas[torch.cat(index).to(device)],
            optimal=optimal.repeat_interleave(times),
        )

    def _noising(self, seed: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Schedule indices (times,) and noise (times, C, H, W) of one sample. They depend only on
        the sample's seed, not on how the batch is split."""
        generator = torch.Generator().manual_seed(seed_of(seed, "noising"))
        index = torch.rand(self.steps, generator=generator).argsort()[: self.times]
        return index, torch.randn(self.times, *shape, generator=generator)

    def loss(self, model: FlowModel, terms: NoisedTerms) -> TermLosses:
        cond = terms.context.cond.rows(terms.row)
        x_t = nft.noised(terms.clean, terms.noise, terms.t)
        with torch.no_grad():  # before the pass that saves activations for backward
            v_old = model.velocity(x_t, terms.t, cond, "old")
            v_ref = model.velocity(x_t, terms.t, cond, "reference") if self.kl > 0 else None
        v = model.velocity(x_t, terms.t, cond)
        loss = nft.contrast(
            v, v_old, terms.clean, x_t, terms.t, terms.optimal, self.beta, self.advantage.clip
        )
        stats = {"drift": (v - v_old).detach().square().flatten(1).mean(1)}
        if v_ref is not None:
            distance = (v - v_ref).square().flatten(1).mean(1)
            loss = loss + self.kl * distance
            stats["kl"] = distance.detach()
        return TermLosses(loss, stats)

    def finish(self, policy: Policy, optimizer_steps: int) -> None:
        decay = nft.old_decay(optimizer_steps, self.decay)
        averages.blend_(policy.copies["old"], policy.tensors("current"), decay)

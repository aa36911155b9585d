"""Flow-GRPO (arXiv 2505.05470): GRPO over the stochastic denoising steps of a flow model.

Defaults are the authors' for SD3.5-M with the OCR reward. The algorithms beside this file are
presets over it: another window, another step rule, another surrogate.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from gesso import config
from gesso.algorithms.advantage import Advantage
from gesso.algorithms.base import Prepared, TermLosses, Terms
from gesso.algorithms.flow import FlowAlgorithm, FlowTerms
from gesso.config import Strict
from gesso.formulas import flow_steps, kl, objectives
from gesso.models.flow.base import FlowModel, Gradient, guided
from gesso.rollout import Rollout
from gesso.types import SampleSpec, Weights, Which
from gesso.weights.policy import Policy
from gesso.weights.roles import RunnableWeights


class Window(Strict):
    """`size` consecutive steps out of [low, high), the same for a whole batch: drawing them per
    sample collapsed a run of a peer. With `every` the window is not drawn but moves on by one step
    after so many iterations, and wraps (MixGRPO)."""

    size: int = Field(3, ge=1)
    low: int = Field(0, ge=0)
    high: int = Field(5, ge=1)
    every: int | None = Field(None, ge=1)

    def place(self, step: int, seed: int) -> range:
        places = self.high - self.size - self.low + 1
        moved = step // self.every % places if self.every else random.Random(seed).randrange(places)
        return range(self.low + moved, self.low + moved + self.size)


@dataclass(frozen=True)
class StepTerms(FlowTerms):
    """One stochastic step of one sample each: from (x, σ) to (x_next, σ_next)."""

    x: Tensor  # (T, C, H, W)
    x_next: Tensor  # (T, C, H, W)
    old_mean: Tensor  # (T, C, H, W) where the surrogate asks for it, else empty
    negative: Tensor  # (T, C, H, W): that branch's velocity where it is known, else empty
    sigma: Tensor  # (T,)
    sigma_next: Tensor  # (T,)
    old_logp: Tensor  # (T,)
    advantage: Tensor  # (T,)


@dataclass(frozen=True)
class SlopeTerms(Terms):
    """Samples whose gradients were taken while they were drawn, all steps of them."""

    slopes: Sequence[Weights]  # N
    advantage: Tensor  # (N,)

    def __len__(self) -> int:
        return self.total

    def micro_batches(self, settings: config.Learner) -> Sequence[Tensor]:
        """All at once: no network is run."""
        return [torch.arange(len(self.slopes))] if self.slopes else []

    def rows(self, index: Tensor) -> SlopeTerms:
        chosen = [self.slopes[i] for i in index.tolist()]
        return SlopeTerms(self.total, chosen, self.advantage[index])

    def loss(self, policy: RunnableWeights) -> Tensor:
        """−Σ A_i·⟨∇logp_i, θ⟩: where the ratio is 1, it has the surrogate's gradient."""
        first, *others = self.advantage.tolist()
        weighted = torch._foreach_mul(list(self.slopes[0].values()), first)  # few, large kernels
        for own, advantage in zip(self.slopes[1:], others, strict=True):
            torch._foreach_add_(weighted, list(own.values()), alpha=advantage)
        return -InnerProduct.apply(weighted, *(policy.trainable[name] for name in self.slopes[0]))


class InnerProduct(torch.autograd.Function):
    """⟨w, θ⟩ over lists of tensors: its gradient is w, and nothing is cut out of a long vector."""

    @staticmethod
    def forward(ctx: Any, weights: Sequence[Tensor], *trained: Tensor) -> Tensor:
        ctx.weights = weights
        return parameters_to_vector(weights) @ parameters_to_vector(trained)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *torch._foreach_mul(ctx.weights, grad)


class FlowGRPO(FlowAlgorithm):
    name: str = "flow-grpo"
    advantage: Advantage = Advantage(drop_flat=True)
    steps: int = Field(10, ge=1, le=config.MAX_STEPS)
    rule: Literal["flow-sde", "cps", "dance"] = "flow-sde"
    noise: float = Field(0.7, ge=0)
    guidance: float = Field(4.5, ge=0)  # 1: off
    guidance_gradient: Gradient = "both"
    timestep_fraction: float = Field(0.99, gt=0, le=1)  # the first so many steps are trained
    window: Window | None = None
    same_noise: bool = False  # a group starts from one noise
    clip: float = Field(1e-4, gt=0)
    beta: float = Field(0.04, ge=0)  # weight of the KL to the reference
    one_pass: bool = False  # gradients are taken while sampling; no pass of an update's own

    keeps_means: ClassVar[bool] = False  # the surrogate needs the means of the sampled steps

    @model_validator(mode="after")
    def _possible(self) -> FlowGRPO:
        w = self.window
        if self.noise == 0:
            raise ValueError(
                f"noise = 0 leaves no stochastic step, and {self.name} learns from log-probs; "
                "use noise > 0, or an algorithm without log-probs such as diffusion-nft"
            )
        if w and not w.low + w.size <= w.high <= self.steps:
            raise ValueError(
                f"a window of {w.size} steps in [{w.low}, {w.high}) does not fit into "
                f"{self.steps} steps; low + size <= high <= steps must hold"
            )
        last_trained = w.high if w else self.terms_a_sample
        if last_trained < 1:
            raise ValueError(
                f"timestep_fraction = {self.timestep_fraction} of {self.steps} steps trains none; "
                f"use at least {1 / self.steps:g}"
            )
        if self.rule == "cps" and self.noise > 1:
            raise ValueError(f"CPS takes a noise of at most 1, got {self.noise:g}")
        if self.rule == "cps" and last_trained == self.steps:
            raise ValueError(
                "the last CPS step has no noise and cannot be trained; "
                "use window.high < steps or timestep_fraction < 1"
            )
        return self

    @model_validator(mode="after")
    def _in_one_pass(self) -> FlowGRPO:
        """Where the ratio is 1 and there is no KL term, a loss is linear in its advantage, which is
        not known yet while its sample is drawn."""
        if not self.one_pass:
            return self
        if type(self).surrogate is not FlowGRPO.surrogate:
            raise ValueError(
                f"one_pass = true takes gradients at a ratio of 1, and {self.name} has a surrogate "
                "that is more than the ratio; leave one_pass out, or use flow-grpo"
            )
        if self.updates != 1:
            raise ValueError(
                "one_pass = true takes gradients with the weights that draw, so a rollout gives "
                f"one optimizer step, got updates = {self.updates}; set updates = 1"
            )
        if self.beta > 0:
            raise ValueError(
                "one_pass = true has no pass for a KL to the reference, got "
                f"beta = {self.beta:g}; set beta = 0"
            )
        return self

    @property
    def needs(self) -> frozenset[Which]:
        return frozenset({"reference"} if self.beta > 0 else ())

    @property
    def terms_a_sample(self) -> int:
        return self.window.size if self.window else int(self.steps * self.timestep_fraction)

    @property
    def clip_range(self) -> float | None:
        return None if self.one_pass else self.clip

    def spec(self, step: int, seed: int, model: config.Model) -> SampleSpec:
        window = self.window.place(step, seed) if self.window else None
        return SampleSpec(
            steps=self.steps,
            height=model.height,
            width=model.width,
            rule=self.rule,
            noise=self.noise,
            stochastic=window or range(self.steps),
            trained=window or range(self.terms_a_sample),
            guidance=self.guidance,
            same_noise=self.same_noise,
            means=self.keeps_means,
            apart=self.guidance_gradient == "conditional",
            slopes=self.one_pass,
        )

    def terms(self, rollout: Rollout, prepared: Prepared) -> StepTerms | SlopeTerms:
        total, advantages = rollout.logp.numel(), prepared.advantages
        if self.beta == 0:  # without a KL term a sample whose advantage is 0 has no gradient
            moved = advantages.nonzero()[:, 0]
            rollout, advantages = rollout.rows(moved), advantages[moved]
        trace, known = rollout.paths, rollout.paths.negatives
        advantages = advantages.float().to(trace.row.device)
        if trace.slopes is not None:
            return SlopeTerms(total, trace.slopes, advantages)
        n, s = rollout.logp.shape
        trained = torch.tensor(trace.context.trained, device=trace.row.device)
        sigmas = trace.context.sigmas
        x = trace.latents[:, :-1].flatten(0, 1)
        return StepTerms(
            context=trace.context,
            total=total,
            row=trace.row.repeat_interleave(s),
            x=x,
            x_next=trace.latents[:, 1:].flatten(0, 1),
            old_mean=trace.means.flatten(0, 1) if self.keeps_means else x.new_empty(len(x), 0),
            negative=x.new_empty(len(x), 0) if known is None else known.flatten(0, 1),
            sigma=sigmas[trained].repeat(n),
            sigma_next=sigmas[trained + 1].repeat(n),
            old_logp=rollout.logp.flatten(),
            advantage=advantages.repeat_interleave(s),
        )

    def loss(self, model: FlowModel, terms: StepTerms | SlopeTerms) -> TermLosses:
        if isinstance(terms, SlopeTerms):
            return TermLosses(terms.loss(model.policy), {})
        reference = None
        if self.beta > 0:  # before the pass that keeps all that its way back needs
            with torch.no_grad():
                reference = self._transition(model, terms, "reference")
        step = self._transition(model, terms, "current")
        logp = step.logp(terms.x_next)
        surrogate = self.surrogate(step, logp, terms)
        loss = surrogate.loss
        stats = {
            "ratio": surrogate.ratio,
            "clipped": surrogate.clipped.float(),
            "abs_dlogp": (logp - terms.old_logp).abs().detach(),
        }
        if reference is not None:
            distance = kl.gaussian_step(step.mean, reference.mean, step.s)
            loss = loss + self.beta * distance
            stats["kl"] = distance.detach()
        return TermLosses(loss, stats)

    def surrogate(
        self, step: flow_steps.Transition, logp: Tensor, terms: StepTerms
    ) -> objectives.Surrogate:
        """What a term's policy gradient is made of; the one place where presets differ."""
        return objectives.clipped(logp, terms.old_logp, terms.advantage, self.clip, self.clip)

    def _transition(
        self, model: FlowModel, terms: StepTerms, weights: Which
    ) -> flow_steps.Transition:
        context = terms.context
        cond = context.cond.rows(terms.row)
        if weights == "current" and terms.negative.numel():  # not differentiated: as it was drawn
            v = model.guide(
                terms.negative, model.velocity(terms.x, terms.sigma, cond), self.guidance
            )
        else:
            v = guided(
                model,
                terms.x,
                terms.sigma,
                cond,
                context.negative.rows(terms.row) if context.negative else None,
                self.guidance,
                weights,
                self.guidance_gradient,
            )
        return flow_steps.transition(
            self.rule, terms.x, v, terms.sigma, terms.sigma_next, context.sigmas[1], self.noise
        )

    def finish(self, policy: Policy, optimizer_steps: int) -> None:
        """Nothing to do: the next batch is drawn with the weights just trained."""

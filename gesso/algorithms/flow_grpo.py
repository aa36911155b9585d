"""Flow-GRPO (arXiv 2505.05470): GRPO over the stochastic denoising steps of a flow model.

Defaults are the authors' for SD3.5-M with the OCR reward. The other flow algorithms with log-probs
are presets of it, with another window, step rule or surrogate.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gesso import config
from gesso.algorithms.advantage import Advantage
from gesso.algorithms.base import Prepared, TermLosses
from gesso.algorithms.flow import FlowAlgorithm, FlowTerms
from gesso.algorithms.one_pass import OnePassTerms, check_one_pass
from gesso.config import Strict
from gesso.formulas import flow_steps, kl, objectives
from gesso.models.flow.base import FlowModel
from gesso.models.flow.guidance import guided
from gesso.rollout import Rollout
from gesso.types import GuidanceGradient, OnePass, SampleSpec, Trajectory, Which
from gesso.weights.policy import Policy

Rule = Literal["flow-sde", "cps", "dance", "flash"]


class Window(Strict):
    """`size` consecutive steps out of [low, high), the same for a whole batch: a published run with
    one window per sample collapsed. With `every` the window is not random but moves by one step
    after `every` iterations, and wraps (MixGRPO). With `per = "prompt"` each prompt has a window,
    the same for its whole group, so that the samples of a group differ in the same steps."""

    size: int = Field(3, ge=1)
    """Number of consecutive steps."""
    low: int = Field(0, ge=0)
    """First step the window may start at."""
    high: int = Field(5, ge=1)
    """The window ends before this step."""
    every: int | None = Field(None, ge=1)
    """None: the window position is drawn at random per batch. A number: it advances by one step
    after this many iterations and wraps around (MixGRPO)."""
    per: Literal["batch", "prompt"] = "batch"
    """One random window position per "batch" or per "prompt"."""

    @model_validator(mode="after")
    def _possible(self) -> Window:
        if self.every and self.per == "prompt":
            raise ValueError(
                'every moves the window of a whole batch; remove every or per = "prompt"'
            )
        return self

    @property
    def starts(self) -> range:
        return range(self.low, self.high - self.size + 1)

    def place(self, step: int, seed: int) -> range:
        if self.every:
            start = self.starts[step // self.every % len(self.starts)]
        else:
            start = self.starts[random.Random(seed).randrange(len(self.starts))]
        return range(start, start + self.size)


@dataclass(frozen=True)
class StepTerms(FlowTerms):
    """Each term is one stochastic step of one sample: from (x, σ) to (x_next, σ_next)."""

    x: Tensor  # (T, C, H, W)
    x_next: Tensor  # (T, C, H, W)
    old_mean: Tensor  # (T, C, H, W) if the surrogate needs it, else empty
    negative: Tensor  # (T, C, H, W): stored velocity of the negative branch, else empty
    sigma: Tensor  # (T,)
    sigma_next: Tensor  # (T,)
    old_logp: Tensor  # (T,)
    advantage: Tensor  # (T,)


class FlowGRPO(FlowAlgorithm):
    name: str = "flow-grpo"
    advantage: Advantage = Advantage(drop_flat=True)
    """Advantage settings."""
    steps: int = Field(10, ge=1, le=config.MAX_STEPS)
    """Denoising steps in training."""
    rule: Rule = "flow-sde"
    """SDE step: "flow-sde"; "cps", which leaves no residual noise in the images; "dance", with
    constant noise strength; or "flash", with a strength proportional to σ."""
    noise: float = Field(0.7, ge=0)
    """Noise level a (η for `dance`); above 0, at most 1 for `cps`."""
    guidance: float = Field(4.5, ge=0)
    """Classifier-free guidance scale, in sampling and in the update. 1 disables it and halves the
    cost."""
    guidance_gradient: GuidanceGradient = "both"
    """Branches that are differentiated: "both", or "conditional", with about half the memory and
    time of an update."""
    timestep_fraction: float = Field(0.99, gt=0, le=1)
    """Fraction of steps to train, counted from the first."""
    window: Window | None = None
    """Restrict noise and training to a window of steps; the others are Euler ODE steps."""
    same_noise: bool = False
    """All samples of a group start from the same initial noise."""
    clip: float = Field(1e-4, gt=0)
    """The ratio is clipped to 1 ± clip."""
    beta: float = Field(0.04, ge=0)
    """Weight of the KL to the reference model. 0 saves a forward pass."""
    one_pass: bool = False
    """Compute gradients while sampling, so that the update runs no network. See the algorithms
    page."""

    keeps_means: ClassVar[bool] = False  # the surrogate needs the means of the sampled steps

    @model_validator(mode="after")
    def _possible(self) -> FlowGRPO:
        w = self.window
        if self.noise == 0:
            raise ValueError(
                f"noise = 0 makes every step deterministic, and {self.name} requires log-probs; "
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
                f"timestep_fraction = {self.timestep_fraction} of {self.steps} steps is less than "
                f"one step; use at least {1 / self.steps:g}"
            )
        if self.rule == "cps" and self.noise > 1:
            raise ValueError(f"CPS requires noise of at most 1, got {self.noise:g}")
        if self.rule == "cps" and last_trained == self.steps:
            raise ValueError(
                "the last CPS step has no noise and cannot be trained; "
                "use window.high < steps or timestep_fraction < 1"
            )
        return self

    @model_validator(mode="after")
    def _possible_in_one_pass(self) -> FlowGRPO:
        if self.one_pass:
            check_one_pass(
                self.name,
                only_the_ratio=type(self).surrogate is FlowGRPO.surrogate,
                updates=self.updates,
                beta=self.beta,
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
            guidance_gradient=self.guidance_gradient,
            record=OnePass() if self.one_pass else Trajectory(means=self.keeps_means),
            starts=self.window.starts if self.window and self.window.per == "prompt" else range(0),
        )

    def terms(self, rollout: Rollout, prepared: Prepared) -> StepTerms | OnePassTerms:
        total, advantages = rollout.logp.numel(), prepared.advantages
        if self.beta == 0:  # without a KL term, a sample with advantage 0 has no gradient
            nonzero = advantages.nonzero()[:, 0]
            rollout, advantages = rollout.rows(nonzero), advantages[nonzero]
        trace, negatives = rollout.flow_trace, rollout.flow_trace.negatives
        advantages = advantages.float().to(trace.row.device)
        if trace.per_sample_grads is not None:
            return OnePassTerms(total, trace.per_sample_grads, advantages)
        s = rollout.logp.shape[1]
        sigmas = trace.context.sigmas
        x = trace.latents[:, :-1].flatten(0, 1)
        return StepTerms(
            context=trace.context,
            total=total,
            row=trace.row.repeat_interleave(s),
            x=x,
            x_next=trace.latents[:, 1:].flatten(0, 1),
            old_mean=trace.means.flatten(0, 1) if self.keeps_means else x.new_empty(len(x), 0),
            negative=x.new_empty(len(x), 0) if negatives is None else negatives.flatten(0, 1),
            sigma=sigmas[trace.steps].flatten(),
            sigma_next=sigmas[trace.steps + 1].flatten(),
            old_logp=rollout.logp.flatten(),
            advantage=advantages.repeat_interleave(s),
        )

    def loss(self, model: FlowModel, terms: StepTerms | OnePassTerms) -> TermLosses:
        if isinstance(terms, OnePassTerms):
            return TermLosses(terms.loss(model.policy), {})
        reference = None
        if self.beta > 0:  # before the pass that saves activations for backward
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
        """The policy-gradient loss of each term; the only method that presets override."""
        return objectives.clipped(logp, terms.old_logp, terms.advantage, self.clip, self.clip)

    def _transition(
        self, model: FlowModel, terms: StepTerms, weights: Which
    ) -> flow_steps.Transition:
        context = terms.context
        cond = context.cond.rows(terms.row)
        # If the negative branch has no gradient, its velocity under the current weights is the
        # one that the sampler stored.
        stored = terms.negative if weights == "current" and terms.negative.numel() else None
        negative = context.negative if stored is None else None
        v = guided(
            model,
            terms.x,
            terms.sigma,
            cond,
            negative.rows(terms.row) if negative else None,
            self.guidance,
            weights,
            self.guidance_gradient,
            stored,
        )
        return flow_steps.transition(
            self.rule,
            terms.x,
            v.velocity,
            terms.sigma,
            terms.sigma_next,
            context.sigmas[1],
            self.noise,
        )

    def with_kl(self, factor: float) -> FlowGRPO | None:
        return self.model_copy(update={"beta": self.beta * factor}) if self.beta > 0 else None

    def finish(self, policy: Policy, optimizer_steps: int) -> None:
        """Nothing to do: the next batch is sampled with the weights just trained."""

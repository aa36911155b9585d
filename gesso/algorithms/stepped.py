"""Base class of the flow algorithms that train on denoising steps: which steps are recorded, and
the step from a recorded state under any weights."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gesso import config
from gesso.algorithms.flow import AnyFlowAlgorithm, FlowTerms, ode_spec
from gesso.config import Strict
from gesso.formulas import flow_steps
from gesso.models.flow.base import FlowModel
from gesso.models.flow.guidance import guided
from gesso.rollout import Rollout
from gesso.types import GuidanceGradient, SampleSpec, Trajectory, Which

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
class StateTerms(FlowTerms):
    """Each term is one state of one sample: x at σ, from which a step leads to σ_next."""

    x: Tensor  # (T, C, H, W)
    negative: Tensor  # (T, C, H, W): stored velocity of the negative branch, else empty
    sigma: Tensor  # (T,)
    sigma_next: Tensor  # (T,)


class Stepped(AnyFlowAlgorithm):
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

    keeps_means: ClassVar[bool] = False  # the loss needs the means of the sampled steps

    @model_validator(mode="after")
    def _possible_steps(self) -> Stepped:
        w = self.window
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
        if self.rule == "cps" and self.noise > 0 and last_trained == self.steps:
            raise ValueError(
                "the last CPS step has no noise and cannot be trained; "
                "use window.high < steps or timestep_fraction < 1"
            )
        return self

    @property
    def terms_a_sample(self) -> int:
        return self.window.size if self.window else int(self.steps * self.timestep_fraction)

    def spec(self, step: int, seed: int, model: config.Model) -> SampleSpec:
        window = self.window.place(step, seed) if self.window else None
        return replace(
            ode_spec(model, self.steps),
            rule=self.rule,
            noise=self.noise,
            stochastic=window or range(self.steps),
            trained=window or range(self.terms_a_sample),
            guidance=self.guidance,
            guidance_gradient=self.guidance_gradient,
            record=Trajectory(means=self.keeps_means),
            starts=self.window.starts if self.window and self.window.per == "prompt" else range(0),
        )

    @staticmethod
    def states(rollout: Rollout) -> StateTerms:
        """The trained steps of all samples; those of a sample are adjacent."""
        trace, s = rollout.flow_trace, rollout.logp.shape[1]
        x, sigmas = trace.latents[:, :-1].flatten(0, 1), trace.context.sigmas
        stored = trace.negatives
        return StateTerms(
            total=rollout.logp.numel(),
            context=trace.context,
            row=trace.row.repeat_interleave(s),
            x=x,
            negative=x.new_empty(len(x), 0) if stored is None else stored.flatten(0, 1),
            sigma=sigmas[trace.steps].flatten(),
            sigma_next=sigmas[trace.steps + 1].flatten(),
        )

    def transition(
        self, model: FlowModel, terms: StateTerms, weights: Which, scale: float | None = None
    ) -> flow_steps.Transition:
        """The step from each state under these weights. `scale`: of the guidance, if it is not the
        algorithm's."""
        guidance = self.guidance if scale is None else scale
        context = terms.context
        cond = context.cond.rows(terms.row)
        if cond.guidance is not None:
            cond = replace(cond, guidance=torch.full_like(cond.guidance, guidance))
        # If the negative branch has no gradient, its velocity under the current weights is the
        # one that the sampler stored.
        stored = terms.negative if weights == "current" and terms.negative.numel() else None
        negative = context.negative if stored is None and guidance > 1 else None
        v = guided(
            model,
            terms.x,
            terms.sigma,
            cond,
            negative.rows(terms.row) if negative else None,
            guidance,
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

"""Flow-GRPO (arXiv 2505.05470): GRPO over the stochastic denoising steps of a flow model.

Defaults are the authors' for SD3.5-M with the OCR reward. The other flow algorithms with log-probs
are presets of it, with another window, step rule or surrogate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gesso import config
from gesso.algorithms.advantage import Advantage
from gesso.algorithms.base import Prepared, TermLosses
from gesso.algorithms.flow import FlowAlgorithm
from gesso.algorithms.gardo import kl_shares
from gesso.algorithms.one_pass import OnePassTerms, check_one_pass
from gesso.algorithms.stepped import StateTerms, Stepped
from gesso.formulas import flow_steps, kl, objectives
from gesso.models.flow.base import FlowModel
from gesso.rollout import Rollout
from gesso.types import OnePass, SampleSpec, Which
from gesso.weights.policy import Policy


@dataclass(frozen=True)
class StepTerms(StateTerms):
    """Each term is one stochastic step of one sample: from (x, σ) to (x_next, σ_next)."""

    x_next: Tensor  # (T, C, H, W)
    old_mean: Tensor  # (T, C, H, W) if the surrogate needs it, else empty
    old_logp: Tensor  # (T,)
    advantage: Tensor  # (T,)
    kl_share: Tensor  # (T,): factor of the KL


class FlowGRPO(Stepped, FlowAlgorithm):
    name: str = "flow-grpo"
    advantage: Advantage = Advantage(drop_flat=True)
    """Advantage settings."""
    same_noise: bool = False
    """All samples of a group start from the same initial noise."""
    clip: float = Field(1e-4, gt=0)
    """The ratio is clipped to 1 ± clip."""
    beta: float = Field(0.04, ge=0)
    """Weight of the KL to the reference model. 0 saves a forward pass."""
    one_pass: bool = False
    """Compute gradients while sampling, so that the update runs no network. See the algorithms
    page."""

    @model_validator(mode="after")
    def _possible(self) -> FlowGRPO:
        if self.noise == 0:
            raise ValueError(
                f"noise = 0 makes every step deterministic, and {self.name} requires log-probs; "
                "use noise > 0, or an algorithm without log-probs such as diffusion-nft"
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
        return frozenset({self.kl_reference} if self.beta > 0 else ())

    @property
    def clip_range(self) -> float | None:
        return None if self.one_pass else self.clip

    def spec(self, step: int, seed: int, model: config.Model) -> SampleSpec:
        spec = replace(super().spec(step, seed, model), same_noise=self.same_noise)
        return replace(spec, record=OnePass()) if self.one_pass else spec

    def terms(self, rollout: Rollout, prepared: Prepared) -> StepTerms | OnePassTerms:
        total, advantages = rollout.logp.numel(), prepared.advantages
        if self.beta == 0:  # without a KL term, a sample with advantage 0 has no gradient
            nonzero = advantages.nonzero()[:, 0]
            rollout, prepared = rollout.rows(nonzero), prepared.rows(nonzero)
            advantages = prepared.advantages
        trace = rollout.flow_trace
        advantages = advantages.float().to(trace.row.device)
        if trace.per_sample_grads is not None:
            return OnePassTerms(total, trace.per_sample_grads, advantages)
        states = self.states(rollout)
        none = states.x.new_empty(len(states.x), 0)
        return StepTerms(
            **vars(replace(states, total=total)),
            x_next=trace.latents[:, 1:].flatten(0, 1),
            old_mean=trace.means.flatten(0, 1) if self.keeps_means else none,
            old_logp=rollout.logp.flatten(),
            advantage=advantages.repeat_interleave(rollout.logp.shape[1]),
            kl_share=kl_shares(prepared.kl_share, trace.row, rollout.logp.shape[1]),
        )

    def loss(self, model: FlowModel, terms: StepTerms | OnePassTerms) -> TermLosses:
        if isinstance(terms, OnePassTerms):
            return TermLosses(terms.loss(model.policy), {})
        reference = None
        if self.beta > 0:  # before the pass that saves activations for backward
            with torch.no_grad():
                reference = self.transition(model, terms, self.kl_reference)
        step = self.transition(model, terms, "current")
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
            loss = loss + self.beta * terms.kl_share * distance
            stats["kl"] = distance.detach()
        return TermLosses(loss, stats)

    def surrogate(
        self, step: flow_steps.Transition, logp: Tensor, terms: StepTerms
    ) -> objectives.Surrogate:
        """The policy-gradient loss of each term; the only method that presets override."""
        return objectives.clipped(logp, terms.old_logp, terms.advantage, self.clip, self.clip)

    def with_kl(self, factor: float) -> FlowGRPO | None:
        return self.model_copy(update={"beta": self.beta * factor}) if self.beta > 0 else None

    def finish(self, policy: Policy, optimizer_steps: int) -> None:
        """Nothing to do: the next batch is sampled with the weights just trained."""

"""Flow-DPPO: the ratio is not clipped; a term is masked if its step has moved too far (in KL) from
the sampled step and the gradient would move it further."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from gesso.algorithms.advantage import Advantage
from gesso.algorithms.flow_grpo import FlowGRPO, StepTerms
from gesso.formulas import flow_steps, kl, objectives


class FlowDPPO(FlowGRPO):
    name: str = "flow-dppo"
    advantage: Advantage = Advantage()
    clip: float = Field(1e-5, gt=0)  # of the step's divergence, not of the ratio
    beta: float = Field(0.0, ge=0)

    keeps_means: ClassVar[bool] = True

    @property
    def clip_range(self) -> float | None:
        return None  # the ratio is not clipped, so its rounding errors do not matter

    def surrogate(
        self, step: flow_steps.Transition, logp: Tensor, terms: StepTerms
    ) -> objectives.Surrogate:
        divergence = kl.gaussian_divergence(step.mean, terms.old_mean, step.std)
        return objectives.masked(logp, terms.old_logp, terms.advantage, divergence, self.clip)

"""GRPO-Guard (arXiv 2510.22319): a ratio that is centred at 1 at every noise level, and equal
weight for every step. The clip range is the authors' for SD3.5-M with the OCR reward; the recipes
contain all of their settings."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from gesso.algorithms.flow_grpo import FlowGRPO, StepTerms
from gesso.formulas import flow_steps, kl, objectives


class GRPOGuard(FlowGRPO):
    name: str = "grpo-guard"
    rule: Literal["flow-sde", "dance", "flash"] = "flow-sde"  # CPS counts no density
    clip: float = Field(2e-6, gt=0)
    beta: float = Field(0.0, ge=0)

    keeps_means: ClassVar[bool] = True

    def surrogate(
        self, step: flow_steps.Transition, logp: Tensor, terms: StepTerms
    ) -> objectives.Surrogate:
        """Each step's loss is divided by −dt. Another implementation omits this, which gives the
        short first steps almost no weight."""
        divergence = kl.gaussian_divergence(step.mean, terms.old_mean, step.std)
        surrogate = objectives.guarded(
            logp, terms.old_logp, terms.advantage, divergence, step.std.flatten(), self.clip
        )
        return replace(surrogate, loss=surrogate.loss / (terms.sigma - terms.sigma_next))

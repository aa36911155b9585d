"""TempFlow-GRPO (arXiv 2508.04324): the samples of a group share their path up to one stochastic
step, where they branch, so that their rewards measure that step; and steps are weighted by their
noise. The clip is the authors'. They branch at every step of four paths per prompt; here each
prompt has one path and one random step."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field
from torch import Tensor

from gesso.algorithms.advantage import Advantage
from gesso.algorithms.flow_grpo import FlowGRPO, StepTerms
from gesso.algorithms.stepped import Window
from gesso.formulas import flow_steps, objectives


class TempFlowGRPO(FlowGRPO):
    name: str = "tempflow-grpo"
    advantage: Advantage = Advantage(std="group")
    window: Window = Window(size=1, low=0, high=9, per="prompt")
    same_noise: bool = True
    beta: float = Field(0.001, ge=0)

    def surrogate(
        self, step: flow_steps.Transition, logp: Tensor, terms: StepTerms
    ) -> objectives.Surrogate:
        """Weighted by the std of the step over its mean in the window."""
        steps = range(self.window.low, self.window.high)
        _, std = flow_steps.scales(self.rule, terms.context.sigmas, steps, self.noise)
        surrogate = super().surrogate(step, logp, terms)
        return replace(surrogate, loss=surrogate.loss * step.std.flatten() / std.mean())

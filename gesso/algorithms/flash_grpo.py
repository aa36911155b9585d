"""Flash-GRPO (arXiv 2605.15980): one stochastic step per prompt, the same for its whole group, and
every step with the same size of gradient. Noise, window and clip are the authors' for Wan2.1."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field
from torch import Tensor

from gesso.algorithms.flow_grpo import FlowGRPO, StepTerms
from gesso.algorithms.stepped import Window
from gesso.config import MAX_STEPS
from gesso.formulas import flow_steps, objectives


class FlashGRPO(FlowGRPO):
    name: str = "flash-grpo"
    group: int = Field(8, ge=1)
    steps: int = Field(20, ge=1, le=MAX_STEPS)
    rule: Literal["flow-sde", "flash"] = "flash"
    noise: float = Field(1.0, ge=0)
    window: Window = Window(size=1, low=0, high=10, per="prompt")
    clip: float = Field(1e-3, gt=0)
    beta: float = Field(0.0, ge=0)

    def surrogate(
        self, step: flow_steps.Transition, logp: Tensor, terms: StepTerms
    ) -> objectives.Surrogate:
        """Weighted by c over its mean in the window; the authors divide by that of the batch."""
        sigmas, low, high = terms.context.sigmas, self.window.low, self.window.high
        s, _ = flow_steps.scales(self.rule, sigmas, range(low, high), self.noise)
        pool = flow_steps.inverse_gain(s, sigmas[low:high], sigmas[low + 1 : high + 1])
        own = flow_steps.inverse_gain(step.s.flatten(), terms.sigma, terms.sigma_next)
        surrogate = super().surrogate(step, logp, terms)
        return replace(surrogate, loss=surrogate.loss * own / pool.mean())

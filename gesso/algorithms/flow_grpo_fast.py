"""Flow-GRPO-Fast (Flow-GRPO's authors): only a short window of steps is stochastic, stored and
trained; the other steps are ODE steps. Defaults are the authors' with CPS and without guidance."""

from __future__ import annotations

from pydantic import Field

from gesso.algorithms.flow_grpo import FlowGRPO
from gesso.algorithms.stepped import Rule, Window


class FlowGRPOFast(FlowGRPO):
    name: str = "flow-grpo-fast"
    rule: Rule = "cps"
    noise: float = Field(0.8, ge=0)
    guidance: float = Field(1.0, ge=0)
    window: Window | None = Window(size=3, low=0, high=5)
    clip: float = Field(1e-5, gt=0)
    beta: float = Field(0.0, ge=0)

"""DanceGRPO (arXiv 2505.07818): the same noise scale at every step, one initial noise per group, no
KL. Steps, noise and group size are the authors' for FLUX.1-dev; the recipes contain all of their
settings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gesso.algorithms.advantage import Advantage
from gesso.algorithms.flow_grpo import FlowGRPO
from gesso.config import MAX_STEPS


class DanceGRPO(FlowGRPO):
    name: str = "dance-grpo"
    group: int = Field(12, ge=1)
    steps: int = Field(16, ge=1, le=MAX_STEPS)
    rule: Literal["flow-sde", "cps", "dance"] = "dance"
    noise: float = Field(0.3, ge=0)
    timestep_fraction: float = Field(0.6, gt=0, le=1)
    same_noise: bool = True
    beta: float = Field(0.0, ge=0)
    advantage: Advantage = Advantage(std="group")

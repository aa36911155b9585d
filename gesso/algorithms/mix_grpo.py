"""MixGRPO (arXiv 2507.21802): a window of SDE steps that moves through the schedule during
training, from noisy steps to clean ones, and wraps around. Window and noise are the authors'; the
recipes contain all of their settings."""

from __future__ import annotations

from pydantic import Field

from gesso.algorithms.advantage import Advantage
from gesso.algorithms.flow_grpo import FlowGRPO
from gesso.algorithms.stepped import Window
from gesso.config import MAX_STEPS


class MixGRPO(FlowGRPO):
    name: str = "mix-grpo"
    group: int = Field(12, ge=1)
    steps: int = Field(25, ge=1, le=MAX_STEPS)
    window: Window | None = Window(size=4, low=0, high=25, every=25)
    beta: float = Field(0.0, ge=0)
    advantage: Advantage = Advantage(std="group")

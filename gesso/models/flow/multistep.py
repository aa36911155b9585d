"""Pipelines with a multistep scheduler (UniPC, DPM-Solver) over flow sigmas.

Its sigmas and timesteps are used, its solver is not: steps are those of `formulas/flow_steps.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gesso.models.flow.pipeline import PipelineModel


class MultistepModel(PipelineModel):
    """FlowMatchEuler works, too."""

    def sigmas(self, steps: int, height: int, width: int, frames: int = 1) -> Tensor:
        """The schedule of the pipeline, with two departures. UniPC begins at .999999, where the
        noise of Flow-SDE is 130 times too large: here it begins at exactly 1. A σ that float32
        rounds to the other side of an integer timestep is moved by one ULP, so that `timestep`
        returns the pipeline's."""
        sigmas = super().sigmas(steps, height, width, frames).clone()
        sigmas[0] = 1.0
        if self.integer_timesteps:
            expected = self.pipe.scheduler.timesteps
            missed = expected - self.timestep(sigmas[:-1])
            towards = sigmas[:-1] + missed
            sigmas[:-1] = torch.where(missed != 0, sigmas[:-1].nextafter(towards), sigmas[:-1])
            assert self.timestep(sigmas[:-1]).equal(expected)
        return sigmas

    @property
    def integer_timesteps(self) -> bool:
        """Those of UniPC, the scheduler of the published folders, are integers."""
        return "use_flow_sigmas" in self.pipe.scheduler.config

    def timestep(self, sigma: Tensor) -> Tensor:
        """1000·σ; with UniPC truncated, and at most 999."""
        scale = self.pipe.scheduler.config.num_train_timesteps
        if not self.integer_timesteps:
            return sigma * scale
        return (sigma.double() * scale).long().clamp(max=scale - 1)

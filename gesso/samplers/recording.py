"""Records the trained steps of the denoising loop.

The loop in `denoise.py` passes every trained step to a recorder and does not depend on its type.
This file contains the plain recorder; `one_pass.py` the one that also computes gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from gesso.traces.flow import FlowContext, FlowTrace
from gesso.types import Weights


@dataclass(frozen=True)
class TrainedStep:
    """One stochastic step of n samples, from x to x_next."""

    x: Tensor  # (n, C, H, W)
    x_next: Tensor  # (n, C, H, W)
    mean: Tensor  # (n, C, H, W)
    logp: Tensor  # (n,)
    negative: Tensor | None  # (n, C, H, W): velocity of the negative branch, if run separately


@dataclass
class Recorded:
    """The trained steps of one trajectory, in order."""

    latents: list[Tensor] = field(default_factory=list)  # S+1, or none
    means: list[Tensor] = field(default_factory=list)
    negatives: list[Tensor] = field(default_factory=list)
    logps: list[Tensor] = field(default_factory=list)
    per_sample_grads: list[Weights] | None = None

    def trace(self, context: FlowContext, rows: Tensor, steps: range, clean: Tensor) -> FlowTrace:
        return FlowTrace(
            context,
            rows,
            torch.tensor(steps, dtype=torch.long, device=rows.device).repeat(len(rows), 1),
            _stacked(self.latents, clean),
            _stacked(self.means, clean),
            clean,
            _stacked(self.negatives, clean) if self.negatives else None,
            self.per_sample_grads,
        )

    def logp(self, clean: Tensor) -> Tensor:
        """(n, S), where S may be 0."""
        return torch.stack(self.logps, 1) if self.logps else clean.new_empty(len(clean), 0)


class StepRecorder(Protocol):
    recorded: Recorded

    def recording(self, samples: int) -> AbstractContextManager[None]:
        """The context of all steps of `samples` samples."""

    def trained_step(self) -> AbstractContextManager[object]:
        """The context of one trained step, from its forward pass to its `record`."""

    def record(self, step: TrainedStep) -> None: ...


class TrajectoryRecorder:
    """Records latents, log-probs and, if requested, means."""

    def __init__(self, means: bool = False) -> None:
        self.means = means
        self.recorded = Recorded()

    def recording(self, samples: int) -> AbstractContextManager[None]:
        return nullcontext()

    def trained_step(self) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self, step: TrainedStep) -> None:
        recorded = self.recorded
        if not recorded.latents:
            recorded.latents.append(step.x)
        recorded.latents.append(step.x_next)
        recorded.logps.append(step.logp)
        if self.means:
            recorded.means.append(step.mean)
        if step.negative is not None:
            recorded.negatives.append(step.negative)


def _stacked(steps: Sequence[Tensor], like: Tensor) -> Tensor:
    """(n, S, C, H, W), where S may be 0."""
    return torch.stack(list(steps), 1) if steps else like.new_empty(len(like), 0, *like.shape[1:])

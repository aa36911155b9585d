"""Per-sample gradients computed during sampling; `gesso/algorithms/one_pass.py` uses them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from gesso.models.flow.base import FlowModel
from gesso.models.repeatable import deterministic_algorithms
from gesso.samplers.recording import TrainedStep, TrajectoryRecorder
from gesso.types import Weights


class OnePassRecorder:
    """Records a trajectory and the gradient of each sample's summed log-probs, over all rows of the
    sample in a pass."""

    def __init__(self, model: FlowModel, rows_per_sample: int) -> None:
        self.model = model
        self.rows_per_sample = rows_per_sample
        self.trajectory = TrajectoryRecorder()
        self.recorded = self.trajectory.recorded

    @contextmanager
    def recording(self, samples: int) -> Iterator[None]:
        """Every pass runs with per-sample weights, differentiated or not, so that a compiled
        network has a single graph."""
        rows = self.model.filled(self.rows_per_sample * samples)
        paired = rows % self.rows_per_sample == 0  # all rows of a sample share its weights
        copies = rows // self.rows_per_sample if paired else rows
        grads = self.model.policy.per_sample_grads(copies)
        with grads as weights, deterministic_algorithms(self.model):
            yield
        self.recorded.per_sample_grads = per_sample_grads(
            weights, samples, 1 if paired else self.rows_per_sample
        )

    def trained_step(self) -> AbstractContextManager[object]:
        return torch.enable_grad()

    def record(self, step: TrainedStep) -> None:
        step.logp.sum().backward()
        self.trajectory.record(replace(step, mean=step.mean.detach(), logp=step.logp.detach()))


def per_sample_grads(weights: Mapping[str, Tensor], samples: int, copies: int) -> list[Weights]:
    """The gradient of each sample. weights: (≥ samples·copies, …) each, with the `copies` of a
    sample adjacent; the remaining gradients belong to rows that pad the batch."""
    grads = {}
    for name, weight in weights.items():
        grad = weight.grad
        if grad is None:  # the network does not use its output, or no step is trained
            continue
        if copies > 1:
            grad = grad[: copies * samples].unflatten(0, (samples, copies)).sum(1)
        grads[name] = grad.unbind()
    return [{name: rows[i] for name, rows in grads.items()} for i in range(samples)]

"""What a walk's recorders keep, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gesso.samplers.one_pass import per_sample_grads
from gesso.samplers.recording import Recorded, TrainedStep, TrajectoryRecorder
from gesso.traces.flow import Conditioning, FlowContext
from gesso.types import OnePass, SampleSpec, Trajectory

CONTEXT = FlowContext(torch.tensor([1.0, 0.0]), Conditioning(torch.zeros(1, 1, 1)), None)


def latents(value: float) -> Tensor:
    return torch.full((2, 1, 1, 1), value)


def recorded(means: bool, negative: bool) -> Recorded:
    """Two steps, from 0 over 1 to 2; the means are 10 and 11, the negative branch's 20 and 21."""
    recorder = TrajectoryRecorder(means)
    with recorder.recording(2):
        for i in range(2):
            with recorder.trained_step():
                logp = torch.tensor([i, -i], dtype=torch.float32)
                u = latents(20.0 + i) if negative else None
                recorder.record(TrainedStep(latents(i), latents(i + 1), latents(10.0 + i), logp, u))
    return recorder.recorded


@pytest.mark.parametrize("means, negative", [(False, False), (True, False), (False, True)])
def test_a_trajectory_has_both_ends_of_every_step(means: bool, negative: bool) -> None:
    steps = recorded(means, negative)
    trace = steps.trace(CONTEXT, torch.zeros(2, dtype=torch.long), range(3, 5), latents(5.0))
    assert trace.steps.tolist() == [[3, 4]] * 2
    assert trace.latents.flatten(1).tolist() == [[0, 1, 2]] * 2
    assert trace.means.flatten(1).tolist() == ([[10, 11]] * 2 if means else [[], []])
    if negative:
        assert trace.negatives is not None
        assert trace.negatives.flatten(1).tolist() == [[20, 21]] * 2
    else:
        assert trace.negatives is None
    assert trace.clean.flatten().tolist() == [5, 5] and trace.per_sample_grads is None
    assert steps.logp(trace.clean).tolist() == [[0, 1], [0, -1]]


def test_a_walk_without_trained_steps_has_empty_tensors() -> None:
    steps = TrajectoryRecorder().recorded
    clean = torch.zeros(2, 3, 4, 5)
    trace = steps.trace(CONTEXT, torch.zeros(2, dtype=torch.long), range(0), clean)
    assert trace.latents.shape == trace.means.shape == (2, 0, 3, 4, 5)
    assert steps.logp(clean).shape == trace.steps.shape == (2, 0)


def weight(*grad: float) -> Tensor:
    leaf = torch.zeros(len(grad), 1, requires_grad=True)
    leaf.grad = torch.tensor(grad)[:, None]
    return leaf


def test_gradients_of_rows_that_fill_are_left_out() -> None:
    unused = torch.zeros(3, 1, requires_grad=True)
    grads = per_sample_grads({"a": weight(1.0, 2.0, 9.0), "unused": unused}, samples=2, copies=1)
    assert grads == [{"a": torch.tensor([1.0])}, {"a": torch.tensor([2.0])}]


def test_gradients_of_a_samples_rows_are_summed() -> None:
    """Two samples in two rows each, and a fifth row that only fills."""
    grads = per_sample_grads({"a": weight(1.0, 2.0, 3.0, 4.0, 9.0)}, samples=2, copies=2)
    assert grads == [{"a": torch.tensor([3.0])}, {"a": torch.tensor([7.0])}]


def test_a_spec_says_what_is_recorded() -> None:
    plain, means, grads = (
        SampleSpec(steps=2, height=32, width=96, record=record)
        for record in (Trajectory(), Trajectory(means=True), OnePass())
    )
    assert [spec.means for spec in (plain, means, grads)] == [False, True, False]
    assert [spec.per_sample_grads for spec in (plain, means, grads)] == [False, False, True]

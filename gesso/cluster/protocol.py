"""The interface between the training loop and the processes that do its work.

`Local` works in this process; other implementations follow the same protocol. The loop handles
samples, scores and metrics, never tensors: traces, weights and optimizer state stay in the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gesso.learner.learner import Update
from gesso.track.writing import Writing
from gesso.types import UNSCALED, Prompt, Sample, Scales, Score, Which


@dataclass(frozen=True)
class Batch:
    """The scored samples of one step. The cluster keeps their traces under `step`."""

    step: int
    version: int  # of the weights that generated it
    samples: Sequence[Sample]  # N, those that are trained on
    scores: Sequence[Score]  # N
    group: Sequence[int]  # N: samples of one prompt share a number
    metrics: Mapping[str, float]  # of all samples, including dropped ones, and timings
    notes: Sequence[str]  # for the log: scores that failed


class ScoresFailed(Exception):
    """More scores of a batch failed than the recipe allows."""

    def __init__(self, reason: str, notes: Sequence[str]) -> None:
        super().__init__(reason)
        self.notes = notes  # of this batch, for the log


class Pending(Protocol):
    """A batch that is being sampled and scored."""

    def result(self) -> Batch:
        """Waits for its last score. Raises a UserError for a prompt that cannot be sampled, or
        ScoresFailed."""


class Cluster(Protocol):
    @property
    def prompts_digest(self) -> str:
        """Digest of the training prompts, to detect changes when a run is resumed."""

    @property
    def prompts_state(self) -> Mapping[str, Any]:
        """State that determines prompts in addition to the seed; empty without a curriculum."""

    def restore_prompts(self, state: Mapping[str, Any]) -> None:
        """The state of a checkpoint; before the first `collect`."""

    def collect(self, step: int) -> Pending:
        """Start batch `step` with the weights published last. Returns immediately; batches are
        sampled in the order of these calls, before the next update."""

    def redraw(self, step: int, versions: range) -> Pending | None:
        """Sample batch `step` again, which was not yet trained on when the checkpoint was written:
        with the first of these versions of the weights, or with `partial` one round with each.
        None: the checkpoint lacks them. Call after `restore` and before the next `publish`."""

    def update(self, batch: Batch, step: int, scales: Scales = UNSCALED) -> Update:
        """Train on a collected batch: all optimizer steps of iteration `step`."""

    def publish(self, version: int) -> None:
        """Send the samplers every copy of the weights that they use. Raises StopRun if a sampler
        has other weights afterwards."""

    def evaluate(self, prompts: Sequence[Prompt], which: Which) -> tuple[list[Sample], list[Score]]:
        """`eval.samples` samples of each prompt, prompt by prompt, with the weights `which`, always
        from the same seeds."""

    def save(self, folder: Path) -> Writing | None:
        """Write weights and optimizer state into an existing folder; None: all are written. They
        may change before the result is done: what is written is a copy."""

    def restore(self, folder: Path) -> None:
        """Read them back. Raises a ValueError, and changes nothing, if they do not match the model.
        The samplers receive them through `publish`."""

    def close(self) -> None:
        """Stop every process that this cluster started."""

"""All that the training loop sees of where a run's work happens.

`Local` does it in this process. Whatever else comes answers the same protocol. No tensor passes
through the loop: samples, scores and figures do; traces, weights and optimizer state stay where
they were made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gesso.learner.learner import Update
from gesso.types import Prompt, Sample, Score, Which


@dataclass(frozen=True)
class Batch:
    """The scored samples of one step. Their traces stay in the cluster under `step`."""

    step: int
    version: int  # of the weights that drew it
    samples: Sequence[Sample]  # N, those that are trained on
    scores: Sequence[Score]  # N
    group: Sequence[int]  # N: samples of one prompt have one number
    metrics: Mapping[str, float]  # of all that was drawn, and the seconds it took
    notes: Sequence[str]  # for the log: scores that failed


class ScoresFailed(Exception):
    """More scores of a batch failed than the recipe allows."""

    def __init__(self, reason: str, notes: Sequence[str]) -> None:
        super().__init__(reason)
        self.notes = notes  # of this batch, for the log


class Pending(Protocol):
    """A batch that is being drawn and scored."""

    def result(self) -> Batch:
        """Waits for its last score. Raises what went wrong: a UserError for a prompt that cannot be
        drawn, ScoresFailed."""


class Cluster(Protocol):
    @property
    def prompts_digest(self) -> str:
        """Of the training prompts: whether a resumed run draws from those it began with."""

    def collect(self, step: int) -> Pending:
        """Start batch `step` with the weights published last. Returns at once; batches are drawn
        in the order of these calls, before the next update."""

    def update(self, batch: Batch, step: int) -> Update:
        """Learn from a collected batch: all optimizer steps of iteration `step`."""

    def publish(self, version: int) -> None:
        """Give the samplers every copy of the weights that they draw with. Raises StopRun where a
        sampler holds anything else afterwards."""

    def evaluate(self, prompts: Sequence[Prompt], which: Which) -> tuple[list[Sample], list[Score]]:
        """One sample of each prompt with those weights, always from the same seeds."""

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state into an existing folder."""

    def restore(self, folder: Path) -> None:
        """Read them back. Raises a ValueError, and changes nothing, where they do not match the
        model. The samplers get them by `publish`."""

    def close(self) -> None:
        """End every process that this started."""

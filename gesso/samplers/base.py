"""The sampler protocol and its output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from gesso.rollout import FlowTrace, Rollout, TokenTrace
from gesso.types import Prompt, Sample
from gesso.weights.publish import HeldWeights, Publication

Trace = TypeVar("Trace", FlowTrace, TokenTrace)


@dataclass(frozen=True)
class Piece(Generic[Trace]):
    """Finished samples. Pieces arrive while other samples are still being generated, and not always
    in order: `index` contains their positions in the call."""

    index: list[int]  # n
    samples: list[Sample]  # n
    trace: Trace
    logp: Tensor  # (n, S)


class Sampler(Protocol):
    model: Any
    weights: HeldWeights

    def accept(self, publication: Publication) -> None:
        """Uses this version of the weights from now on."""

    def sample(
        self, prompts: Sequence[Prompt], row: Sequence[int], seeds: Sequence[int], spec: Any
    ) -> Iterator[Piece]:
        """One sample of prompts[row[i]] from seeds[i] for every i, under an algorithm's spec."""

    def describe(self, rollout: Rollout) -> dict[str, float]:
        """Metrics of these samples, except their rewards."""

    def close(self) -> None:
        """Releases all resources except the model."""

"""What an algorithm is to the rest of Gesso: a frozen object built from pure formulas.

The learner cuts a rollout into mini-batches (one optimizer step each) and those into micro-batches
of *terms*: one (sample, step) pair of a flow model each. An algorithm says what the terms are and
what each costs; it never sees an optimizer, and the learner never sees a formula.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from gesso.algorithms.advantage import Advantage
from gesso.models.flow.base import FlowModel
from gesso.models.policy import Policy
from gesso.types import FlowContext, Rollout, SampleSpec, Which

T = TypeVar("T", bound="Terms")


@dataclass(frozen=True)
class Terms:
    """T terms. Every tensor field of a subclass has leading dimension T."""

    context: FlowContext
    total: (
        int  # what the summed loss is divided by; above T where terms without gradient are left out
    )
    row: Tensor  # (T,): term → row of the context's conditioning

    def __len__(self) -> int:
        return len(self.row)

    def rows(self: T, index: slice | Tensor) -> T:
        cut = {
            field.name: value[index]
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, **cut)


@dataclass(frozen=True)
class TermLosses:
    loss: Tensor  # (T,), with gradient
    stats: Mapping[str, Tensor]  # (T,) each, without


class Algorithm(Protocol):
    group: int  # samples a prompt
    updates: int  # optimizer steps a rollout
    advantage: Advantage

    @property
    def needs(self) -> frozenset[Which]:
        """Copies of the weights it asks for beside the current ones."""

    @property
    def terms_a_sample(self) -> int:
        """How many terms each sample gives."""

    @property
    def clip_range(self) -> float | None:
        """Width of the ratio's clip: rounding must stay under it. None without a ratio."""

    def spec(self, step: int, seed: int, height: int, width: int) -> SampleSpec:
        """How to draw batch `step`, which has this seed."""

    def terms(self, rollout: Rollout, advantages: Tensor, generator: torch.Generator) -> Terms:
        """All terms of these samples."""

    def loss(self, model: FlowModel, terms: Terms) -> TermLosses:
        """Cost of each term, independent of the other terms of its micro-batch."""

    def finish(self, policy: Policy, step: int) -> None:
        """After the last update of iteration `step` (from 0)."""

"""What an algorithm is to the rest of Gesso: a frozen object built from pure formulas.

The learner cuts a rollout into mini-batches (one optimizer step each) and those into micro-batches
of *terms*: a (sample, step) pair of a flow model or a reply of a token model each. An algorithm
says what the terms are and what each costs; it never sees an optimizer, and the learner never sees
a formula.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor

from gesso import config
from gesso.rollout import Rollout, TokenTrace
from gesso.types import ReplySpec, SampleSpec, Which
from gesso.weights.policy import Policy

R = TypeVar("R", bound="Rows")


@dataclass(frozen=True)
class Rows:
    """Rows of something: tensors, and traces of tokens, of one leading dimension."""

    def rows(self: R, index: Tensor) -> R:
        cut: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                cut[field.name] = value[index]
            elif isinstance(value, TokenTrace):
                cut[field.name] = value.rows(index)
        return dataclasses.replace(self, **cut)


@dataclass(frozen=True)
class Prepared(Rows):
    """What is worked out of a whole rollout before its first update, one row a sample."""

    advantages: Tensor  # (N,) of a sample, or (N, S) of each of its tokens


@dataclass(frozen=True)
class Terms(Rows, ABC):
    """Terms of one mini-batch."""

    total: int  # what the summed loss is divided by

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def micro_batches(self, settings: config.Learner) -> Sequence[Tensor]:
        """Indices of the terms that go through one forward and backward pass together."""


@dataclass(frozen=True)
class TermLosses:
    loss: Tensor  # (T,) or their sum, with gradient
    stats: Mapping[str, Tensor]  # flat, without: one value a term, or a token


class Advantage(Protocol):
    @property
    def drop_flat(self) -> bool:
        """Whether groups without spread leave the batch."""

    def __call__(self, rollout: Rollout) -> Tensor:
        """(N,) of a sample, or (N, S) of each of its tokens."""

    def kept(self, rollout: Rollout, multiple: int) -> Tensor:
        """Indices of the samples to train on, as many as can be split into `multiple` parts."""


class Algorithm(Protocol):
    family: ClassVar[config.FamilyName]  # of the models it trains

    @property
    def group(self) -> int:
        """Samples a prompt."""

    @property
    def updates(self) -> int:
        """Optimizer steps a pass over a rollout."""

    @property
    def epochs(self) -> int:
        """Passes over a rollout."""

    @property
    def refills(self) -> int:
        """Further batches that may be drawn in place of groups without spread."""

    @property
    def advantage(self) -> Advantage: ...

    @property
    def needs(self) -> frozenset[Which]:
        """Copies of the weights it asks for beside the current ones."""

    @property
    def terms_a_sample(self) -> int:
        """How many terms each sample gives."""

    @property
    def clip_range(self) -> float | None:
        """Width of the ratio's clip: rounding must stay under it. None without a ratio."""

    def spec(self, step: int, seed: int, model: Any) -> SampleSpec | ReplySpec:
        """How to draw batch `step`, which has this seed."""

    def eval_spec(self, watched: config.Eval, model: Any, weights: Which) -> SampleSpec | ReplySpec:
        """How to draw what is looked at."""

    def greedy_spec(self) -> ReplySpec | None:
        """How to draw the greedy reply of a prompt, where samples are compared with its reward."""

    def prepare(self, model: Any, rollout: Rollout, settings: config.Learner) -> Prepared:
        """Advantages, and whatever else is the same for all updates of this rollout."""

    def terms(self, rollout: Rollout, prepared: Any) -> Terms:
        """All terms of these samples. What is random about them comes from the samples' seeds, so
        that it does not depend on how a batch is cut."""

    def loss(self, model: Any, terms: Any) -> TermLosses:
        """Cost of each term, independent of the other terms of its micro-batch."""

    def finish(self, policy: Policy, optimizer_steps: int) -> None:
        """After the last update of an iteration; `optimizer_steps` were taken so far in the run."""

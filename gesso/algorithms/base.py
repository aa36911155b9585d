"""The algorithm protocol: a frozen object built from pure formulas.

The learner splits a rollout into mini-batches (one optimizer step each) and those into
micro-batches of *terms*: (sample, step) pairs of a flow model or responses of a language model. An
algorithm defines the terms and their losses. It does not use the optimizer, and the learner does
not use formulas.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from gesso import config
from gesso.devices import to_device
from gesso.ranks import ALONE, Ranks
from gesso.rollout import Rollout
from gesso.traces.tokens import TokenTrace
from gesso.types import ResponseSpec, SampleSpec, Scales, Which
from gesso.weights.policy import Policy

R = TypeVar("R", bound="Rows")


@dataclass(frozen=True)
class Rows:
    """Tensors, token traces and further `Rows` with one leading dimension."""

    def rows(self: R, index: Tensor) -> R:
        cut: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                cut[field.name] = value[index]
            elif isinstance(value, TokenTrace | Rows):
                cut[field.name] = value.rows(index)
        return dataclasses.replace(self, **cut)

    def on(self: R, device: torch.device) -> R:
        """The same with its tensors on this device; a token trace stays on the CPU."""
        moved: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = to_device(value, device)
            elif isinstance(value, Rows):
                moved[field.name] = value.on(device)
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True)
class Prepared(Rows):
    """Computed from a whole rollout before its first update, one row per sample."""

    advantages: Tensor  # (N,) per sample, or (N, S) per token
    kl_share: Tensor | None = dataclasses.field(default=None, kw_only=True)
    """(N,) share of the KL of each sample. None: all of it."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict, kw_only=True)
    picked: Tensor | None = dataclasses.field(default=None, kw_only=True)
    """(N,) bool: the samples that have terms. None: all."""


@dataclass(frozen=True)
class Terms(Rows, ABC):
    """Terms of one mini-batch."""

    total: int  # divisor of the summed loss

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def micro_batches(self, settings: config.Learner) -> Sequence[Tensor]:
        """Indices of the terms that go through one forward and backward pass together."""

    def cost(self, index: Tensor) -> float:
        """Work of a micro-batch relative to the others, by which ranks divide them."""
        return len(index)


@dataclass(frozen=True)
class TermLosses:
    loss: Tensor  # (T,) or their sum, with gradient
    stats: Mapping[str, Tensor]  # flat, without gradient: one value per term or token


class AdvantageEstimator(Protocol):
    @property
    def compares(self) -> bool:
        """Whether a sample is compared with the other samples of its prompt."""

    @property
    def drop_flat(self) -> bool:
        """Whether groups without spread are dropped."""

    def __call__(self, rollout: Rollout) -> Tensor:
        """(N,) per sample, or (N, S) per token."""

    def kept(self, rollout: Rollout, multiple: int) -> Tensor:
        """Indices of the samples to train on; their number is divisible by `multiple`."""


class Algorithm(Protocol):
    family: ClassVar[config.FamilyName]  # of the models it trains
    whole_groups: ClassVar[bool]  # whether the samples of a group stay in one mini-batch
    # Columns of the samples that a row gives, the best first; empty: it trains on its own samples.
    given: ClassVar[tuple[str, ...]]

    @property
    def group(self) -> int:
        """Samples per prompt."""

    @property
    def updates(self) -> int:
        """Optimizer steps per pass over a rollout."""

    @property
    def epochs(self) -> int:
        """Passes over a rollout."""

    @property
    def refills(self) -> int:
        """Further batches that may be sampled to replace groups without spread."""

    @property
    def probe(self) -> int | None:
        """Samples per prompt that decide whether the others are needed. None: all are."""

    @property
    def advantage(self) -> AdvantageEstimator: ...

    @property
    def needs(self) -> frozenset[Which]:
        """Copies of the weights that the algorithm uses in addition to the current weights."""

    @property
    def terms_a_sample(self) -> int:
        """Terms per sample."""

    @property
    def clip_range(self) -> float | None:
        """Clip range of the ratio, which rounding errors must not exceed. None without a ratio."""

    def spec(self, step: int, seed: int, model: Any) -> SampleSpec | ResponseSpec:
        """Sampling spec of batch `step`, which has this seed."""

    def eval_spec(
        self, watched: config.Eval, model: Any, weights: Which
    ) -> SampleSpec | ResponseSpec:
        """Sampling spec of an evaluation."""

    def greedy_spec(self) -> ResponseSpec | None:
        """Sampling spec of the greedy response to a prompt, if its reward is the baseline."""

    def prepare(
        self, model: Any, rollout: Rollout, settings: config.Learner, ranks: Ranks = ALONE
    ) -> Prepared:
        """Advantages, and everything else that is shared by all updates of this rollout. `ranks`
        divide its passes through the network."""

    def terms(self, rollout: Rollout, prepared: Any) -> Terms:
        """All terms of these samples. Their randomness comes from the samples' seeds, so that it
        does not depend on how a batch is split."""

    def complete(self, model: Any, terms: Any, settings: config.Learner, ranks: Ranks) -> Terms:
        """Adds what depends on all terms of a mini-batch and on the weights before its update.
        `ranks` divide its passes through the network."""

    def loss(self, model: Any, terms: Any) -> TermLosses:
        """Loss of each term, independent of the other terms of its micro-batch."""

    def with_kl(self, factor: float) -> Algorithm | None:
        """The same algorithm with its KL weight multiplied; None if it has no KL."""

    def next_scales(self, scales: Scales, rows: Sequence[Mapping[str, Any]]) -> Scales:
        """The scales of the iteration after these rows, with changes that the algorithm makes
        itself."""

    def with_share(self, share: float) -> Algorithm:
        """The same algorithm with this share of its gate."""

    def finish(self, policy: Policy, optimizer_steps: int) -> None:
        """Called after the last update of an iteration, when the run has taken `optimizer_steps`
        optimizer steps."""

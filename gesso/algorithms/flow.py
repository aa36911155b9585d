"""Base class and terms of the algorithms for flow models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from pydantic import Field, model_validator
from torch import Tensor

from gesso import config
from gesso.algorithms.advantage import Advantage
from gesso.algorithms.base import Prepared, Terms
from gesso.algorithms.gardo import KLGate, Renewal, Row, gated
from gesso.models.flow.base import FlowModel
from gesso.ranks import ALONE, Ranks
from gesso.rollout import Rollout
from gesso.traces.flow import FlowContext
from gesso.types import SampleSpec, Scales, Which

A = TypeVar("A", bound="AnyFlowAlgorithm")
B = TypeVar("B", bound="FlowAlgorithm")


@dataclass(frozen=True)
class FlowTerms(Terms):
    """T terms. Every tensor has the leading dimension T, which may be less than `total`: terms
    without gradient are omitted."""

    context: FlowContext
    row: Tensor  # (T,): term → row of the context's conditioning

    def __len__(self) -> int:
        return len(self.row)

    def micro_batches(self, settings: config.Learner) -> Sequence[Tensor]:
        """Reference images of different sizes are in different micro-batches."""
        alike = self.context.cond.alike(self.row) if len(self) else []
        return [part for index in alike for part in index.split(settings.micro_batch)]


def ode_spec(model: config.Model, steps: int) -> SampleSpec:
    """An ODE without guidance, at the size of the recipe; algorithms replace what differs."""
    return SampleSpec(
        steps=steps,
        height=model.height,
        width=model.width,
        frames=model.frames,
        fps=model.fps,
    )


class AnyFlowAlgorithm(config.Strict):
    """A flow algorithm, with or without rewards."""

    name: str
    """Name of the algorithm."""
    group: int = Field(24, ge=1)
    """Samples per prompt."""
    updates: int = Field(2, ge=1)
    """Optimizer steps per rollout."""

    family: ClassVar[config.FamilyName] = "flow"
    whole_groups: ClassVar[bool] = False
    given: ClassVar[tuple[str, ...]] = ()
    epochs: ClassVar[int] = 1
    refills: ClassVar[int] = 0
    probe: ClassVar[None] = None

    def eval_spec(self, watched: config.Eval, model: config.Model, weights: Which) -> SampleSpec:
        """An ODE with the evaluation's steps and guidance."""
        assert watched.guidance is not None, "build.recipe_from fills it in"
        return replace(
            ode_spec(model, watched.steps),
            height=watched.height or model.height,
            width=watched.width or model.width,
            frames=watched.frames or model.frames,
            guidance=watched.guidance,
            weights=weights,
        )

    def greedy_spec(self) -> None:
        """None: images are compared only within their group."""

    def next_scales(self, scales: Scales, rows: Sequence[Row]) -> Scales:
        """Nothing changes between iterations."""
        return scales

    def with_share(self: A, share: float) -> A:
        raise AssertionError(f"{self.name} has no gate")

    def complete(self, model: Any, terms: Any, settings: config.Learner, ranks: Ranks) -> Any:
        """Nothing to add: terms are independent of each other."""
        return terms


class FlowAlgorithm(AnyFlowAlgorithm):
    advantage: Advantage = Advantage()
    """Advantage settings."""
    gate: KLGate | None = None
    """GARDO: apply the KL only to samples that the rewards of weight 0 doubt. None: to all."""
    renew: Renewal | None = None
    """GARDO: renew the reference of the KL. None: it stays the model before training."""

    @model_validator(mode="after")
    def _comparable(self) -> FlowAlgorithm:
        if self.group == 1 and self.advantage.compares:
            raise ValueError(
                "the samples of a group are compared with each other; use group = 2 or more"
            )
        return self

    def prepare(
        self,
        model: FlowModel,
        rollout: Rollout,
        settings: config.Learner,
        ranks: Ranks = ALONE,
    ) -> Prepared:
        return Prepared(self.advantage(rollout), **gated(self.gate, rollout))

    @property
    def kl_reference(self) -> Which:
        """The weights that the KL compares with."""
        return "reference" if self.renew is None else "renewed"

    def next_scales(self, scales: Scales, rows: Sequence[Row]) -> Scales:
        """Sets the share of the gate, and whether the reference is renewed."""
        share = None if self.gate is None else self.gate.next_share(rows)
        renew = None if self.renew is None else self.renew.due(rows)
        return replace(scales, share=share, renew=renew)

    def with_share(self: B, share: float) -> B:
        """The same algorithm with this share of its gate."""
        assert self.gate is not None
        gate = self.gate.model_copy(update={"share": share})
        return self.model_copy(update={"gate": gate})

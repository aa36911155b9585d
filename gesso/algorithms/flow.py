"""Base class and terms of the algorithms for flow models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from gesso import config
from gesso.algorithms.advantage import Advantage
from gesso.algorithms.base import Prepared, Terms
from gesso.models.flow.base import FlowModel
from gesso.ranks import ALONE, Ranks
from gesso.rollout import FlowContext, Rollout
from gesso.types import SampleSpec, Which


@dataclass(frozen=True)
class FlowTerms(Terms):
    """T terms. Every tensor has the leading dimension T, which may be less than `total`: terms
    without gradient are omitted."""

    context: FlowContext
    row: Tensor  # (T,): term → row of the context's conditioning

    def __len__(self) -> int:
        return len(self.row)

    def micro_batches(self, settings: config.Learner) -> Sequence[Tensor]:
        index = torch.arange(len(self), device=self.row.device)
        return index.split(settings.micro_batch) if len(index) else []


class AnyFlowAlgorithm(config.Strict):
    """With rewards or without."""

    name: str
    """Name of the algorithm."""
    group: int = Field(24, ge=1)
    """Samples per prompt."""
    updates: int = Field(2, ge=1)
    """Optimizer steps per rollout."""

    family: ClassVar[config.FamilyName] = "flow"
    whole_groups: ClassVar[bool] = False
    epochs: ClassVar[int] = 1
    refills: ClassVar[int] = 0

    def eval_spec(self, watched: config.Eval, model: config.Model, weights: Which) -> SampleSpec:
        """An ODE with the evaluation's steps and guidance."""
        assert watched.guidance is not None, "build.recipe_from fills it in"
        return SampleSpec(
            steps=watched.steps,
            height=model.height,
            width=model.width,
            guidance=watched.guidance,
            weights=weights,
        )

    def greedy_spec(self) -> None:
        """None: images are compared only within their group."""

    def complete(self, model: Any, terms: Any, settings: config.Learner, ranks: Ranks) -> Any:
        """Nothing to add: terms are independent of each other."""
        return terms


class FlowAlgorithm(AnyFlowAlgorithm):
    advantage: Advantage = Advantage()
    """Advantage settings."""

    def prepare(
        self,
        model: FlowModel,
        rollout: Rollout,
        settings: config.Learner,
        ranks: Ranks = ALONE,
    ) -> Prepared:
        return Prepared(self.advantage(rollout))

"""On-policy distillation for flow models: the student samples, and learns the steps that its
teachers would take from the states it has reached. No reward is used.

Teachers are copies of the trained weights (`Learner.teach`), so one network serves all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gesso import config
from gesso.algorithms.advantage import Equal
from gesso.algorithms.base import Prepared, TermLosses
from gesso.algorithms.stepped import StateTerms, Stepped
from gesso.algorithms.teachers import Teacher
from gesso.formulas import flow_steps, kl
from gesso.models.flow.base import FlowModel
from gesso.ranks import ALONE, Ranks, fill
from gesso.rollout import Rollout
from gesso.types import SampleSpec, Which, teacher_name
from gesso.weights.policy import Policy


class FlowTeacher(Teacher):
    guidance: float | None = Field(None, ge=0)
    """Guidance scale of this teacher. None: that of the student."""


@dataclass(frozen=True)
class TaughtTerms(StateTerms):
    """Each term is one state of one sample, and the step of its teacher."""

    teacher: Tensor  # (T,): index into the algorithm's teachers
    target: Tensor  # (T, C, H, W): mean of the teacher's step; (T, 0) before `complete`

    def micro_batches(self, settings: config.Learner) -> Sequence[Tensor]:
        """Micro-batches with one teacher each."""
        return [part for parts in self.by_teacher(settings).values() for part in parts]

    def by_teacher(self, settings: config.Learner) -> dict[int, Sequence[Tensor]]:
        teacher, device = self.teacher.cpu(), self.row.device
        parts: dict[int, Sequence[Tensor]] = {}
        for one in teacher.unique().tolist():
            own = (teacher == one).nonzero()[:, 0].to(device)
            alike = self.context.cond.alike(self.row[own])
            parts[one] = [p for index in alike for p in own[index].split(settings.micro_batch)]
        return parts


class FlowOPD(Stepped):
    """The teachers' steps are those of the student's solver: Euler steps unless `noise` is set."""

    name: str = "flow-opd"
    group: int = Field(1, ge=1)
    updates: int = Field(1, ge=1)
    noise: float = Field(0.0, ge=0)
    teachers: dict[str, FlowTeacher] = Field(min_length=1)
    """One `[algorithm.teachers.NAME]` table per teacher."""
    column: str = Field("teacher", min_length=1)
    """Column of the training prompts with the name of a prompt's teacher."""
    distance: Literal["square", "kl", "kl-without-dt"] = "square"
    """Of the means μ of a step of student and teacher: "square", ½(μ − μ')²; "kl", divided by the
    variance of the step; "kl-without-dt", divided by s², its noise scale without dt."""

    advantage: ClassVar[Equal] = Equal()
    clip_range: ClassVar[None] = None

    @model_validator(mode="after")
    def _has_noise(self) -> FlowOPD:
        if self.distance != "square" and self.noise == 0:
            raise ValueError(
                f'distance = "{self.distance}" divides by the noise of a step; set noise above 0, '
                'or use distance = "square"'
            )
        return self

    @property
    def needs(self) -> frozenset[Which]:
        return frozenset(teacher_name(name) for name in self.teachers)

    @property
    def scales(self) -> list[float]:
        """Guidance of each teacher."""
        given = [teacher.guidance for teacher in self.teachers.values()]
        return [self.guidance if scale is None else scale for scale in given]

    def spec(self, step: int, seed: int, model: config.Model) -> SampleSpec:
        return replace(super().spec(step, seed, model), negatives=max(self.scales) > 1)

    def prepare(
        self, model: FlowModel, rollout: Rollout, settings: config.Learner, ranks: Ranks = ALONE
    ) -> Prepared:
        return Prepared(self.advantage(rollout))

    def terms(self, rollout: Rollout, prepared: Prepared) -> TaughtTerms:
        states, names = self.states(rollout), list(self.teachers)
        # `flow_checks` has refused prompts without a teacher, if there are several.
        given = [sample.prompt.columns.get(self.column) or names[0] for sample in rollout.samples]
        teacher = torch.tensor([names.index(name) for name in given])
        return TaughtTerms(
            **vars(states),
            teacher=teacher.repeat_interleave(rollout.logp.shape[1]).to(states.row.device),
            target=states.x.new_empty(len(states), 0),
        )

    @torch.no_grad()
    def complete(
        self, model: FlowModel, terms: TaughtTerms, settings: config.Learner, ranks: Ranks
    ) -> TaughtTerms:
        """Adds the teachers' steps, one teacher after the other: where weights are sharded, all
        ranks must run the same one. The passes are those of `loss`, so that a student who equals
        its teacher has a distance of exactly 0."""
        target = torch.zeros_like(terms.x, dtype=torch.float32)
        for one, parts in terms.by_teacher(settings).items():
            name, scale = teacher_name(list(self.teachers)[one]), self.scales[one]

            def means(part: Tensor) -> Tensor:
                return self.transition(model, terms.rows(part), name, scale).mean  # noqa: B023

            with model.policy.folded():  # one at a time: each is as large as the weights
                fill(target, parts, [len(part) for part in parts], means, ranks)
        return replace(terms, target=target)

    def loss(self, model: FlowModel, terms: TaughtTerms) -> TermLosses:
        step = self.transition(model, terms, "current")
        distance = self._distance(step, terms.target)
        stats = {"distance": distance.detach()}
        if len(self.teachers) > 1:
            name = list(self.teachers)[int(terms.teacher[:1].cpu())]
            stats[f"distance/{name}"] = distance.detach()
        return TermLosses(distance, stats)

    def _distance(self, step: flow_steps.Transition, target: Tensor) -> Tensor:
        if self.distance == "square":
            return kl.half_square(step.mean, target)
        if self.distance == "kl":
            return kl.gaussian_divergence(step.mean, target, step.std)
        return kl.gaussian_step(step.mean, target, step.s)

    def with_kl(self, factor: float) -> None:
        """None: there is no KL to a reference."""

    def finish(self, policy: Policy, optimizer_steps: int) -> None:
        """Nothing to do: the next batch is sampled with the weights just trained."""

"""Iterations of a recipe with synthetic scores, for scripts that measure sampling and updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter as now
from typing import Any, cast

import numpy as np

from gesso import build
from gesso.cluster.local import Local
from gesso.config import Strict
from gesso.rewards.transport.service import RewardService, Scored
from gesso.run import Assembled, assemble
from gesso.types import Sample, Score


class Unscored:
    """Replaces the reward service, and the scores of a call: synthetic ones, immediately."""

    processes = 0
    rewards: Sequence[Any] = ()

    def begin(self, groups: Sequence[int], held_out: bool = False, weights: Any = None) -> Unscored:
        self.pending = len(groups)
        return self

    def add(self, index: Sequence[int], samples: Sequence[Sample]) -> None:
        """Scores do not depend on samples."""

    def result(self, advance: Callable[[int], object]) -> Scored:
        return Scored([Score(float(r)) for r in made_up(self.pending)], now(), now())


def made_up(n: int) -> np.ndarray:
    """Distinct rewards, so that every sample has an advantage and a gradient."""
    return np.random.default_rng(0).random(n)


class Iterations:
    def __init__(self, job: Assembled) -> None:
        self.job = job
        self.step = 0
        self.resize(job.recipe.data.groups, {})

    def resize(self, groups: int, options: dict[str, Any]) -> None:
        """Continues with `groups` prompts and other options of the algorithm."""
        job = self.job
        data = job.recipe.data.model_copy(update={"groups": groups})
        recipe = job.recipe.model_copy(update={"data": data})
        assert isinstance(job.algorithm, Strict)
        algorithm = job.algorithm.model_copy(update=options)
        job.learner.algorithm = algorithm
        sampler, stream = job.local.sampler, job.cluster.stream
        unscored = cast(RewardService, Unscored())
        self.cluster = Local(recipe, job.learner, sampler, unscored, stream)

    def __call__(self) -> None:
        """Samples and updates once; prompts are new every time."""
        rollout, _ = self.cluster.sample_step(self.step).result()
        self.job.learner.update(rollout, self.step)
        self.cluster.publish(self.step + 1)
        self.step += 1


@contextmanager
def iterations(recipe: str, overrides: Sequence[str] = ()) -> Iterator[Iterations]:
    job = assemble(build.recipe(recipe, list(overrides)))
    try:
        yield Iterations(job)
    finally:
        job.close()

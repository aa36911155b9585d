"""A cluster of one process: sampling and updates in this process, rewards in workers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

from gesso.cluster.collecting import Request
from gesso.cluster.driver import Driver
from gesso.cluster.host import peak_memory, sharing_cores
from gesso.config import Recipe
from gesso.data.prompts import Stream
from gesso.learner.learner import Learner, Update
from gesso.rewards.transport.service import RewardService
from gesso.rollout import Rollout
from gesso.samplers import partial as partial_responses
from gesso.samplers.base import Piece, Sampler
from gesso.timeline import recorder
from gesso.track.checkpoints import on_host, read_tensors, write_tensors
from gesso.track.progress import SILENT, Progress
from gesso.track.writing import InBackground, Writing
from gesso.types import Scales, Which
from gesso.weights.history import History
from gesso.weights.publish import Publication, publish


class Local(Driver):
    def __init__(
        self,
        recipe: Recipe,
        learner: Learner,
        sampler: Sampler,
        rewards: RewardService,
        stream: Stream,
        progress: Progress = SILENT,
    ) -> None:
        super().__init__(recipe, learner.algorithm, rewards, stream, progress)
        self.learner = learner
        self.sampler = sampler
        self._history = History(recipe.lag)
        self.publish(0)

    def generate(self, request: Request) -> Iterator[Piece]:
        self.sampler.weights.verify(self._publication)
        with sharing_cores(self.sampler.model.device, self.rewards.processes):
            more = partial_responses.options(request.begun)
            prompts, row, seeds = request.prompts, request.row, request.seeds
            pieces = self.sampler.sample(prompts, row, seeds, request.spec, **more)
            yield from recorder.each("sample", pieces)

    def describe(self, rollout: Rollout) -> dict[str, float]:
        return self.sampler.describe(rollout)

    def train(self, rollout: Rollout, step: int, scales: Scales) -> Update:
        with recorder.phase("update"):
            update = self.learner.update(rollout, step, scales)
        update.metrics["memory/gb"] = peak_memory(self.sampler.model.device)
        return update

    def send(self, copies: Collection[Which], version: int, kept: Collection[Which]) -> None:
        with recorder.phase("publish"):
            self._publication: Publication = publish(self.learner.policy, copies, version)
            self.sampler.accept(self._publication)
            self.sampler.weights.verify(self._publication)
            self._history.add(self._publication, kept)

    def exchange(self, version: int) -> bool:
        return self._history.exchange(self.learner.policy, version)

    def save(self, folder: Path) -> Writing | None:
        self.partial_batches.save(folder)
        state = self.learner.state() | self._history.state()
        if self.recipe.save.in_background(self.sampler.model.device.type):
            return InBackground(partial(write_tensors, folder, on_host(state)))
        write_tensors(folder, state)
        return None

    def load(self, folder: Path) -> None:
        self._history.restore(read_tensors(folder), self.learner.restore)

    def stop(self) -> None:
        self.sampler.close()

"""A cluster in which some workers sample and the others train.

A batch is sampled in a thread of the driver, while the workers that train update from an earlier
one. Samplers hold copies of the weights: a new version is sent when they have finished the batches
that were collected before it, so that every batch has one version, whatever the speed of a worker.
Traces wait in the sampler, and go to a worker that trains when it is their turn.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from gesso import clock
from gesso.cluster.collecting import Request
from gesso.cluster.driver import DriverBatch
from gesso.cluster.processes import Message, Processes
from gesso.cluster.routes import Parcel
from gesso.cluster.workers import Workers, same_weights
from gesso.learner.learner import Update
from gesso.rollout import Rollout
from gesso.timeline import recorder
from gesso.types import Prompt, Scales, Which


class Apart(Workers):
    shares_weights = False
    _thread: ThreadPoolExecutor | None = None

    def divide(self, processes: Processes) -> tuple[Processes, Processes]:
        self._end_thread()
        self._thread = ThreadPoolExecutor(1, "samplers")
        self._jobs: dict[int, Future[None]] = {}  # by step
        self._drawn: dict[int, tuple[list[Prompt], Mapping[str, float]]] = {}  # to be sampled
        self._unopened: dict[str, tuple[dict[str, Any], bytes]] = {}  # calls, by learners
        self._parcels: dict[str, Sequence[int]] = {}  # by piece
        self._trained: list[int] = []  # steps whose traces samplers can drop
        self._learner = 0  # that gets the next piece
        self._weights = {"cluster/weights_gb": 0.0, "cluster/weights_s": 0.0}
        self._since = clock.seconds()
        learners = processes.count - self._placement.samplers
        for worker in processes.workers[learners:]:
            worker.row = recorder.sampler(worker.rank)
        return processes.part(0, learners), processes.part(learners, self._placement.samplers)

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    # Sampling

    def enqueue(self, batch: DriverBatch) -> None:
        self._drawn[batch.step] = super().draw(batch.step, None)  # here: prompts may depend on time
        assert self._thread is not None
        self._jobs[batch.step] = self._thread.submit(batch.sample)

    def wait_for(self, batch: DriverBatch) -> None:
        self._jobs.pop(batch.step).result()

    def draw(self, step: int, groups: int | None) -> tuple[list[Prompt], Mapping[str, float]]:
        return self._drawn.pop(step, None) or super().draw(step, groups)

    def open(self, call: dict[str, Any], prompts: bytes) -> None:
        if call["step"] is not None:
            self._unopened[call["key"]] = call, prompts
        super().open(call, prompts)

    def destination(self, request: Request) -> int | None:
        if request.step is None:  # of an evaluation nothing is trained
            return None
        self._learner = (self._learner + 1) % self.processes.count
        return self._learner

    def sampled(self, name: str, message: Message) -> None:
        if "parcel" in message.content:
            self._parcels[name] = message.content["parcel"]
            self._owners[name] = Parcel(*self._parcels[name]).learner

    # Training

    def share(self, pieces: Sequence[str]) -> None:
        for key in dict.fromkeys(name.partition("/")[0] for name in pieces):
            if key in self._unopened:
                call, prompts = self._unopened.pop(key)
                self.processes.all("open", call, prompts)
        parcels = {name: self._parcels.pop(name) for name in pieces}
        self.processes.all("take", {"parcels": parcels})
        self._sent += sum(Parcel(*values).size for values in parcels.values())
        super().share(pieces)

    def train(self, rollout: Rollout, step: int, scales: Scales) -> Update:
        update = super().train(rollout, step, scales)
        update.metrics.update(self._weights)
        self._trained.append(step)
        return update

    def _idle(self) -> dict[str, float]:
        """Samplers and learners work at the same time."""
        self._since, since = clock.seconds(), self._since
        self._elapsed = self._since - since
        return super()._idle()

    def send(self, copies: Collection[Which], version: int, kept: Collection[Which]) -> None:
        wait(self._jobs.values())
        while self._trained:
            self.sampling.all("forget", {"step": self._trained.pop()})
        content = {"copies": sorted(copies), "version": version}
        self.processes.begin("publish", {**content, "kept": sorted(kept)})
        self.sampling.begin("accept", content)
        answers = self.processes.answers()
        digests = [answer["digest"] for answer in [*answers, *self.sampling.answers()]]
        same_weights(digests, version)
        size, seconds = answers[0]["bytes"] * self.sampling.count, answers[0]["seconds"]
        self._weights = {"cluster/weights_gb": size / 1e9, "cluster/weights_s": seconds}

    def stop(self) -> None:
        super().stop()
        self._end_thread()

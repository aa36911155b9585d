"""A cluster in which some workers only sample (samplers) and the others only train (learners).

A thread of the driver directs the sampling of a batch while the learners train on an earlier one.
Samplers have their own copies of the weights. They get a new version after they have finished the
batches collected before it, so that a batch is sampled with one version, however fast the workers
are. A trace stays in its sampler until a learner needs it.

When a sampler is lost, the others sample its parts. Traces that no learner has received are sampled
again from the same seeds and weights. If it is lost while weights are sent, the workers restart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import astuple, replace
from typing import Any

from gesso import clock
from gesso.cluster.collecting import Request
from gesso.cluster.driver import DriverBatch
from gesso.cluster.processes import Message, Processes
from gesso.cluster.protocol import Batch
from gesso.cluster.transfer import Parcel
from gesso.cluster.workers import Call, Workers, same_weights
from gesso.learner.learner import Update
from gesso.rollout import Rollout
from gesso.timeline import recorder
from gesso.types import Prompt, Scales, Which, WorkerLost


class SeparateSamplers(Workers):
    shares_weights = False
    _thread: ThreadPoolExecutor | None = None

    def divide(self, processes: Processes) -> tuple[Processes, Processes]:
        self._end_thread()
        self._thread = ThreadPoolExecutor(1, "samplers")
        self._jobs: dict[int, Future[None]] = {}  # by step; −1: a round of `partial`
        self._drawn: dict[
            int, tuple[list[Prompt], Mapping[str, float]]
        ] = {}  # prompts not yet sampled, by step
        self._calls_of_step: dict[
            str, tuple[Call, int]
        ] = {}  # with weight versions, until trained on
        self._unopened: set[str] = set()  # calls that the learners do not know yet
        self._parcels: dict[str, Parcel] = {}  # by piece
        self._trained: list[int] = []  # steps whose traces samplers can drop
        self._learner = 0  # receives the next piece
        self._losses: list[str] = []  # messages for the log
        self._weights = {"cluster/weights_gb": 0.0, "cluster/weights_s": 0.0}
        self._since = clock.seconds()
        self._connected = samplers = self._placement.samplers
        learners = processes.count - samplers
        for worker in processes.workers[learners:]:
            worker.row = recorder.sampler(worker.rank)
        one_engine = samplers == self._placement.parallel
        sampling = processes.part(learners, samplers, needed=one_engine)
        return processes.part(0, learners), sampling

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    # Sampling

    def enqueue(self, batch: DriverBatch) -> None:
        self._drawn[batch.step] = super().draw(batch.step, None)  # here: prompts may depend on time
        assert self._thread is not None
        self._jobs[batch.step] = self._thread.submit(batch.sample)

    def wait_for(self, batch: DriverBatch) -> None:
        if self.recipe.partial:
            self._end_round()
            self.partial_batches.finish(batch.step)
        else:
            self._jobs.pop(batch.step).result()

    def begin_round(self) -> None:
        """Samples a round during the update."""
        self._end_round()
        assert self._thread is not None
        self._jobs[-1] = self._thread.submit(self.partial_batches.sample_round)

    def _end_round(self) -> None:
        if -1 in self._jobs:
            self._jobs.pop(-1).result()

    def draw(self, step: int, groups: int | None) -> tuple[list[Prompt], Mapping[str, float]]:
        return self._drawn.pop(step, None) or super().draw(step, groups)

    def open(self, call: Call) -> None:
        if call.request.trained:
            key = call.content["key"]
            self._calls_of_step[key] = call, self._version
            self._unopened.add(key)
        super().open(call)

    def destination(self, request: Request) -> int | None:
        if not request.trained:
            return None
        self._learner = (self._learner + 1) % self.processes.count
        return self._learner

    def sampled(self, name: str, message: Message) -> None:
        if "parcel" in message.content:
            self._parcels[name] = Parcel(*message.content["parcel"])
            self._owners[name] = self._parcels[name].learner

    def finish(self, batch: DriverBatch) -> Batch:
        found = super().finish(batch)
        losses, self._losses = self._losses, []
        return replace(found, notes=[*losses, *found.notes])

    # Lost samplers

    def lost(self, error: WorkerLost) -> None:
        """With the others of its engine."""
        lost = [group for group in self._groups if error.rank in group]
        if not lost or len(self._groups) == 1:
            raise error
        self._groups.remove(lost[0])
        self.sampling.drop(lost[0], needed=len(self._groups) == 1)
        left = self.sampling.count
        self._losses.append(f"{error}; it was a sampler, and {left} more continue without it")

    def ask(self, task: str, content: Mapping[str, Any], *data: bytes) -> None:
        """Repeats the task when a sampler is lost."""
        while True:
            try:
                return super().ask(task, content, *data)
            except WorkerLost as error:
                self.lost(error)

    def _sample_again(self, pieces: Sequence[str]) -> None:
        """Samples the pieces whose traces were lost with their samplers, on other samplers."""
        while lost := [p for p in pieces if self._parcels[p].sampler not in self.sampling.ranks]:
            wait(self._jobs.values())
            started, count = clock.seconds(), 0
            for key in dict.fromkeys(name.partition("/")[0] for name in lost):
                call, version = self._calls_of_step[key]
                firsts = [int(name.removeprefix(f"{key}/")) for name in lost if _of(name, key)]
                parts = [part for part in call.parts if any(first in part for first in firsts)]
                with self._sampling_with(version):
                    self.ask("open", call.content, *call.data)
                    count += sum(len(p.index) for p in self.deal(call.request, key, parts))
            seconds = clock.seconds() - started
            text = f"{count} samples of lost samplers were sampled again in {seconds:.1f} s"
            self._losses.append(text)

    @contextmanager
    def _sampling_with(self, version: int) -> Iterator[None]:
        """Samplers temporarily get this earlier version of the weights."""
        newest, copies = self._version, self._published
        if version == newest:
            yield
            return
        held = self.exchange(version)
        assert held, "learners keep all versions that batches in flight have"
        self.send(self._sampled_with(version), version, ())
        yield
        self.exchange(version)
        self.send(copies, newest, ())

    # Training

    def share(self, pieces: Sequence[str]) -> None:
        for key in dict.fromkeys(name.partition("/")[0] for name in pieces):
            if key in self._unopened:
                call, _ = self._calls_of_step[key]
                self.processes.all("open", call.content, *call.data)
                self._unopened.remove(key)
        self._take(pieces)
        self._sent += sum(self._parcels.pop(name).size for name in pieces)
        super().share(pieces)

    def _take(self, pieces: Sequence[str]) -> None:
        while True:
            self._sample_again(pieces)
            parcels = {name: self._parcels[name] for name in pieces}
            packed = {name: astuple(parcel) for name, parcel in parcels.items()}
            try:
                self.processes.all("take", {"parcels": packed})
                return
            except WorkerLost as error:
                wait(self._jobs.values())
                left = self.sampling.ranks
                if error.rank in left:
                    self.lost(error)
                elif all(parcel.sampler in left for parcel in parcels.values()):
                    raise  # otherwise the sampling thread has handled the loss

    def train(self, rollout: Rollout, step: int, scales: Scales) -> Update:
        update = super().train(rollout, step, scales)
        update.metrics.update(self._weights)
        self._trained.append(step)
        return update

    def forget(self, step: int | None) -> None:
        super().forget(step)
        for key in [key for key in self._calls_of_step if key.startswith(f"{step}.")]:
            del self._calls_of_step[key]

    def _idle(self) -> dict[str, float]:
        """Relative to the whole time since the last call: samplers and learners work in
        parallel."""
        self._since, since = clock.seconds(), self._since
        self._elapsed = self._since - since
        return super()._idle()

    def send(self, copies: Collection[Which], version: int, kept: Collection[Which]) -> None:
        wait(self._jobs.values())
        while self._trained:
            self.ask("forget", {"step": self._trained.pop()})
        self._leave_out()
        content = {"copies": sorted(copies), "version": version}
        self.processes.begin("publish", {**content, "kept": sorted(kept)})
        self.sampling.begin("accept", content)
        answers = self.processes.answers()
        digests = [answer["digest"] for answer in [*answers, *self.sampling.answers()]]
        same_weights(digests, version)
        size, seconds = answers[0]["bytes"] * self.sampling.count, answers[0]["seconds"]
        self._weights = {"cluster/weights_gb": size / 1e9, "cluster/weights_s": seconds}

    def _leave_out(self) -> None:
        """Excludes lost samplers from the transfer of weights."""
        try:
            self.sampling.check()
        except WorkerLost as error:
            self.lost(error)
            return self._leave_out()
        if self._connected > self.sampling.count:
            left = {"left": self.sampling.ranks}
            self.processes.all("leave_out", left)
            self.sampling.all("leave_out", left)
            self._connected = self.sampling.count

    def stop(self) -> None:
        super().stop()
        self._end_thread()


def _of(piece: str, key: str) -> bool:
    return piece.startswith(f"{key}/")

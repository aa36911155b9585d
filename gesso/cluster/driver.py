"""The part of a cluster that handles prompts and rewards, wherever samples are computed.

This is a base class: `Local` computes in this process, `Workers` in others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import pstdev
from typing import Any

from gesso.algorithms.base import Algorithm
from gesso.cluster import collecting
from gesso.cluster.collecting import PendingSamples, PendingStep, Request, Timing
from gesso.cluster.partial import PartialBatches
from gesso.cluster.protocol import Batch, ScoresFailed
from gesso.cluster.scores import reward_metrics
from gesso.config import Recipe
from gesso.data.prompts import Stream
from gesso.learner.learner import Update
from gesso.rewards.transport.service import RewardService
from gesso.rollout import Rollout
from gesso.samplers.base import Piece
from gesso.track import groups as saved_groups
from gesso.track import media
from gesso.track.progress import SILENT, Progress
from gesso.track.writing import Writing
from gesso.types import (
    UNSCALED,
    Prompt,
    Sample,
    Scales,
    Score,
    StopRun,
    UserError,
    Which,
    eval_seed,
    seed_of,
)


@dataclass
class DriverBatch:
    """A batch: queued, then sampled, then scored."""

    cluster: Driver
    step: int
    pending: PendingStep | None = None
    error: UserError | StopRun | None = None

    def sample(self) -> None:
        """Errors are kept for `result`: this also runs while waiting for another batch."""
        try:
            self.pending = self.cluster.sample_step(self.step)
        except (UserError, StopRun) as error:
            self.error = error

    def result(self) -> Batch:
        self.cluster.wait_for(self)
        if self.error is not None:
            raise self.error
        return self.cluster.finish(self)


class Driver(ABC):
    shares_weights = True
    """Whether samplers run the weights that an update changes."""

    def __init__(
        self,
        recipe: Recipe,
        algorithm: Algorithm,
        rewards: RewardService,
        stream: Stream,
        progress: Progress = SILENT,
    ) -> None:
        self.recipe = recipe
        self.algorithm = algorithm
        self.rewards = rewards
        self.stream = stream
        self.progress = progress
        self._queue: deque[DriverBatch] = deque()  # batches not yet sampled, in order
        self._rollouts: dict[int, Rollout] = {}  # batches collected and not yet trained on, by step
        self.partial_batches = PartialBatches(recipe.lag, self.generate, progress)  # with `partial`
        self._first_prompts = stream.state()
        self._changed = False  # whether the weights are newer than those published last
        scored = {reward.name for reward in rewards.rewards}  # none if the data gives the scores
        self._entries = [entry for entry in recipe.reward if entry.label in scored]

    # What a subclass computes

    @abstractmethod
    def generate(self, request: Request) -> Iterator[Piece]:
        """Samples with the weights published last, in pieces as they finish; raises StopRun if a
        sampler has other weights."""

    @abstractmethod
    def describe(self, rollout: Rollout) -> dict[str, float]:
        """Metrics of these samples, except their rewards."""

    @abstractmethod
    def train(self, rollout: Rollout, step: int, scales: Scales) -> Update:
        """All optimizer steps of iteration `step`."""

    @abstractmethod
    def send(self, copies: Collection[Which], version: int, kept: Collection[Which]) -> None:
        """Gives the samplers these copies of the weights, and verifies that they have them. `kept`
        are for later checkpoints (`weights/history.py`)."""

    @abstractmethod
    def exchange(self, version: int) -> bool:
        """Swaps the learner's weights with those of an earlier version; a second call swaps back.
        False: this version was not kept."""

    @abstractmethod
    def save(self, folder: Path) -> Writing | None: ...

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Reads weights and optimizer state; raises a ValueError if they do not match the model."""

    @abstractmethod
    def stop(self) -> None:
        """Releases everything except the rewards."""

    @property
    def prompts_digest(self) -> str:
        return self.stream.digest

    @property
    def prompts_state(self) -> Mapping[str, Any]:
        return self.stream.state()

    def restore_prompts(self, state: Mapping[str, Any]) -> None:
        self.stream.restore(state)

    # Collecting

    def collect(self, step: int) -> DriverBatch:
        """Sampling and updating take turns in this process: a queued batch is sampled when the loop
        waits for a result, and at the latest before the next update."""
        batch = DriverBatch(self, step)
        if self.recipe.partial:
            self.partial_batches.begin(batch, *self._step_request(step, None, None))
        else:
            self.enqueue(batch)
        return batch

    def enqueue(self, batch: DriverBatch) -> None:
        self._queue.append(batch)

    def sample_queued(self) -> None:
        while self._queue:
            self._queue.popleft().sample()

    def wait_for(self, batch: DriverBatch) -> None:
        """Returns when the batch is sampled."""
        self.sample_queued()
        if self.recipe.partial:
            self.partial_batches.finish(batch.step)

    def begin_round(self) -> None:
        """Called before an update with `partial`."""
        self.partial_batches.sample_round()

    def draw(self, step: int, groups: int | None) -> tuple[list[Prompt], Mapping[str, float]]:
        """The prompts of batch `step`, and metrics of how they were drawn."""
        prompts = self.stream.batch(step, groups or self.recipe.data.groups)
        return prompts, self.stream.metrics()

    def sample_step(
        self, step: int, groups: int | None = None, group: int | None = None
    ) -> PendingStep:
        """Batch `step`: `groups` prompts with `group` samples each; None: as in the recipe."""
        if group is None and step in self.partial_batches.by_step:
            partial = self.partial_batches.by_step[step]
            finished = replace(self._sample(partial.whole), started=partial.started)
            return PendingStep(finished, None, partial.drawn)
        request, drawn = self._step_request(step, groups, group)
        pending, prompts = self._sample(request), request.prompts
        spec = self.algorithm.greedy_spec()
        if spec is None:
            return PendingStep(pending, None, drawn)
        rows, seeds = range(len(prompts)), [0] * len(prompts)
        greedy = Request(prompts, rows, seeds, spec, f"{request.label}, greedy", step)
        return PendingStep(pending, self._sample(greedy), drawn)

    def _step_request(
        self, step: int, groups: int | None, group: int | None
    ) -> tuple[Request, Mapping[str, float]]:
        """Also returns metrics of how its prompts were drawn."""
        prompts, drawn = self.draw(step, groups)
        each, label = group or self.algorithm.group, f"batch {step + 1}"
        request = self._request(prompts, step, each, ("sample",), label)
        if group is not None:  # to measure
            request = replace(request, keep=lambda i, sample: sample)
        if group is None and self.algorithm.probe is not None:
            request = request.part(range(len(prompts)), range(self.algorithm.probe))
        return request, drawn

    def _request(
        self,
        prompts: Sequence[Prompt],
        step: int,
        group: int,
        purpose: tuple[str | int, ...],
        label: str,
    ) -> Request:
        """`group` samples of each prompt, as the algorithm samples batch `step`."""
        seed = self.recipe.seed
        row = [i for i in range(len(prompts)) for _ in range(group)]
        seeds = [seed_of(seed, *purpose, step, i) for i in range(len(row))]
        spec = self.algorithm.spec(step, seed_of(seed, "spec", step), self.recipe.model)
        needed = saved_groups.needed(self.recipe, step)
        return Request(
            prompts, row, seeds, spec, label, step, keep=lambda i, sample: needed(sample)
        )

    def _sample(self, request: Request) -> PendingSamples:
        if self._changed and self.shares_weights:
            raise StopRun("the weights have changed since they were last published to the sampler")
        if request.spec.weights not in self._published:
            raise StopRun(f'the weights "{request.spec.weights}" were not published to the sampler')
        pieces, step = self.generate(request), request.step or 0  # evaluations have other weights
        weights = {entry.label: entry.weight_at(step) for entry in self._entries}
        version = self._version if request.begun is None else request.begun.oldest
        return collecting.sample(request, pieces, version, self.rewards, weights, self.progress)

    def finish(self, batch: DriverBatch) -> Batch:
        """Wait for the scores, drop samples without a score, replace flat groups."""
        assert batch.pending is not None
        rollout, timing = batch.pending.result()
        ended = 0
        if self.algorithm.probe is not None:
            rollout, timing, ended = self._complete(rollout, timing, batch)
        metrics = self.describe(rollout) | dict(batch.pending.drawn)
        if self.rewards.rewards:  # otherwise the data gives the scores, which never change
            metrics = reward_metrics(rollout.scores) | metrics
        ramped = [entry.label for entry in self._entries if entry.ramp is not None]
        metrics |= {f"reward/{name}/weight": rollout.weights[name] for name in ramped}
        if self.algorithm.probe is not None:
            metrics["ended_early"] = float(ended)
        if self.recipe.partial:
            metrics |= self.partial_batches.by_step[batch.step].metrics()
        notes: list[str] = []
        rollout = self._without_failed(rollout, batch.step, notes)
        self._observe(rollout, batch.step)
        if self.algorithm.refills:
            rollout, metrics["refilled"] = self._refill(rollout, batch.step, notes)
        self._rollouts[batch.step] = rollout
        return Batch(
            batch.step,
            rollout.version,
            rollout.samples,
            rollout.scores,
            rollout.group.tolist(),
            metrics | _seconds(timing),
            notes,
        )

    def _complete(
        self, rollout: Rollout, timing: Timing, batch: DriverBatch
    ) -> tuple[Rollout, Timing, int]:
        """Samples the rest of the groups whose first samples differ in reward; also returns the
        number of the other groups. Seeds are those of a step without `probe`."""
        assert batch.pending is not None and self.algorithm.probe is not None
        first, group = batch.pending.samples.request, self.algorithm.group
        rewards: dict[int, set[float]] = {row: set() for row in first.row}
        for row, score in zip(rollout.group.tolist(), rollout.scores, strict=True):
            if score.ok and score.value is not None:
                rewards[row].add(score.value)
        open_rows = [row for row, seen in rewards.items() if len(seen) > 1]
        if not open_rows:
            return rollout, timing, len(rewards)
        label = f"batch {batch.step + 1}, {len(open_rows)} groups"
        whole = self._request(first.prompts, batch.step, group, ("sample",), label)
        rest = whole.part(open_rows, range(self.algorithm.probe, group))
        more, further = self._sample(rest).result()
        return Rollout.merge(rollout, more), timing + further, len(rewards) - len(open_rows)

    def _refill(self, rollout: Rollout, step: int, notes: list[str]) -> tuple[Rollout, float]:
        """Replaces flat groups, in at most `refills` attempts; also returns the number of sampled
        groups."""
        groups, sampled = self.recipe.data.groups, 0
        for attempt in range(1, self.algorithm.refills + 1):
            kept = rollout.rows(self.algorithm.advantage.kept(rollout, 1))
            missing = groups - len(kept.group.unique())
            if missing == 0:
                break
            more, _ = self.sample_refill(step, attempt, missing).result()
            sampled += missing
            more = self._without_failed(more, step, notes, refill=True)
            self._observe(more, step)
            if len(more.samples):
                rollout = Rollout.join(kept, more)
        return rollout, float(sampled)

    def _observe(self, rollout: Rollout, step: int) -> None:
        """Reports the spread of each group's rewards to a curriculum; one sample has none."""
        if self.recipe.data.curriculum is None:
            return
        groups: dict[int, list[int]] = {}
        for i, group in enumerate(rollout.group.tolist()):
            groups.setdefault(group, []).append(i)
        several = [members for members in groups.values() if len(members) > 1]
        rewards = rollout.rewards.tolist()
        prompts = [rollout.samples[members[0]].prompt for members in several]
        spreads = [pstdev(rewards[i] for i in members) for members in several]
        self.stream.observe(step, prompts, spreads)

    def sample_refill(self, step: int, attempt: int, groups: int) -> PendingSamples:
        """More groups for batch `step`, with prompts from a separate stream."""
        stream = self.stream.other(seed_of(self.recipe.seed, "refill", attempt))
        prompts = stream.batch(step, self.recipe.data.groups)[:groups]
        purpose, label = ("refill", attempt), f"{groups} more groups"
        return self._sample(self._request(prompts, step, self.algorithm.group, purpose, label))

    def _without_failed(
        self, rollout: Rollout, step: int, notes: list[str], refill: bool = False
    ) -> Rollout:
        """Drops samples without a score; too many of them are an error. In a refill, which may be a
        single group, their share is relative to the size of a whole batch."""
        good, total = rollout.scored, len(rollout.scores)
        failed = total - len(good)
        if not failed:
            return rollout
        last = [s.error for s in rollout.scores if s.error is not None][-1]
        notes.append(f"step {step + 1}: {failed} of {total} scores failed; last error: {last}")
        whole = self.recipe.data.groups * self.algorithm.group if refill else total
        share, allowed = failed / whole, self.recipe.max_failed
        if share > allowed or (len(good) < 2 and not refill):
            raise ScoresFailed(
                f"{failed} of {whole} scores failed ({share:.0%}); max_failed allows "
                f"{allowed:.0%}; last error: {last}",
                notes,
            )
        return rollout.rows(good)

    # Learning

    def update(self, batch: Batch, step: int, scales: Scales = UNSCALED) -> Update:
        self.sample_queued()  # with the weights before this update
        if self.recipe.partial:
            del self.partial_batches.by_step[batch.step]
            self.begin_round()
        self._changed = True
        update = self.train(self._rollouts.pop(batch.step), step, scales)
        update.metrics["cached"] = self.rewards.new_hits()
        return update

    def publish(self, version: int) -> None:
        assert not self._queue, "queued batches must be sampled before new weights are published"
        training = self._sampled_with(version)
        evaluated: Which = "ema" if self.recipe.learner.ema else "current"
        self._publish(training | {evaluated}, version, training)

    def _publish(self, copies: set[Which], version: int, kept: Collection[Which]) -> None:
        self.send(copies, version, kept)
        self._published, self._version = copies, version
        self._changed = False

    def redraw(self, step: int, versions: range) -> DriverBatch | None:
        if step in self.partial_batches:
            return self.collect(step)
        if self.recipe.partial and not versions.start:  # the number of its rounds is unknown
            return None
        batch = None
        for version in versions if self.recipe.partial else versions[:1]:
            if not self.exchange(version):
                return None
            self._publish(self._sampled_with(version), version, ())
            batch = batch or self.collect(step)
            if self.recipe.partial:
                self.partial_batches.sample_round(only=step)
            else:
                self.sample_queued()
            self.exchange(version)
            self._changed = True
        return batch

    def _sampled_with(self, version: int) -> set[Which]:
        """The copies of the weights that batches until the next version are sampled with."""
        steps = range(version, version + self.recipe.lag + 1)
        training = {self.algorithm.spec(step, 0, self.recipe.model).weights for step in steps}
        if greedy := self.algorithm.greedy_spec():
            training.add(greedy.weights)
        return training

    def evaluate(self, prompts: Sequence[Prompt], which: Which) -> tuple[list[Sample], list[Score]]:
        section, seed = self.recipe.eval, self.recipe.seed
        spec = self.algorithm.eval_spec(section, self.recipe.model, which)
        each = [(i, j) for i in range(len(prompts)) for j in range(section.samples)]
        seeds = [eval_seed(seed, i, j) for i, j in each]
        shown = {i * section.samples for i in range(section.shown)}
        request = Request(
            prompts,
            [i for i, _ in each],
            seeds,
            spec,
            "the evaluation",
            keep=lambda i, sample: sample if i in shown else media.without_image(sample),
        )
        return collecting.samples_and_scores(self._sample(request))

    def restore(self, folder: Path) -> None:
        self._changed = True
        self.load(folder)
        self.partial_batches.load(folder)

    def restart(self) -> None:
        """Replaces the workers by new ones with initial weights."""
        raise NotImplementedError("there are no workers")

    def reset(self) -> None:
        """Restores the state before the first step."""
        self._queue.clear()
        self._rollouts.clear()
        self.partial_batches.clear()
        self.stream.restore(self._first_prompts)

    def close(self) -> None:
        self.rewards.close()
        self.stop()


def _seconds(timing: Timing) -> dict[str, float]:
    return {f"time/{name}": value for name, value in asdict(timing).items()}

"""Everything in this process: sampling and updates here, rewards in worker processes beside it."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from gesso.algorithms.base import Algorithm
from gesso.config import Recipe
from gesso.data.prompts import Stream
from gesso.rewards.transport.service import RewardService, Scored
from gesso.rollout import Rollout, widened
from gesso.samplers.base import Piece, Sampler
from gesso.track.progress import SILENT, Progress
from gesso.types import (
    Prompt,
    ReplySpec,
    Sample,
    SampleSpec,
    Score,
    Which,
    seed_of,
)


@dataclass(frozen=True)
class Timing:
    """Seconds of one batch: drawing it, scoring it, both at once, and waiting for the scores."""

    sample: float
    score: float
    overlap: float
    wait: float


@dataclass(frozen=True)
class Pending:
    """A batch that is drawn and still being scored."""

    pieces: Sequence[Piece]
    futures: Sequence[Future[Scored]]
    group: torch.Tensor
    version: int
    weights: Mapping[str, float]
    started: float
    drawn: float
    progress: Progress
    use: str  # what it is drawn for
    greedy: Pending | None = None  # one greedy sample of each group, to compare with

    def result(self) -> tuple[Rollout, Timing]:
        waiting = time.perf_counter()
        self._wait()
        scored = [future.result() for future in self.futures]
        done = time.perf_counter()
        first, last = min(s.started for s in scored), max(s.ended for s in scored)
        timing = Timing(
            sample=self.drawn - self.started,
            score=last - first,
            overlap=max(0.0, min(self.drawn, last) - first),
            wait=done - waiting,
        )
        index = torch.tensor([i for piece in self.pieces for i in piece.index])
        rollout = Rollout(
            samples=[sample for piece in self.pieces for sample in piece.samples],
            group=self.group[index],
            trace=type(self.pieces[0].trace).concat([piece.trace for piece in self.pieces]),
            logp=widened([piece.logp for piece in self.pieces]),
            version=self.version,
            scores=[score for s in scored for score in s.scores],
            weights=self.weights,
        )
        if index.diff().lt(0).any():  # finished in another order than asked for
            rollout = rollout.rows(index.argsort())
        return self._compared(rollout), timing

    def _wait(self) -> None:
        """Until all scores are there, telling of each piece as it comes."""
        sizes = {f: len(p.samples) for f, p in zip(self.futures, self.pieces, strict=True)}
        self.progress.phase(f"scoring {self.use}", sum(sizes.values()))
        for future in as_completed(sizes):
            self.progress.advance(sizes[future])

    def _compared(self, rollout: Rollout) -> Rollout:
        """Each sample beside the greedy one of its group. Where that has no score, it has none."""
        if self.greedy is None:
            return rollout
        found, _ = self.greedy.result()
        of_group = dict(zip(found.group.tolist(), found.scores, strict=True))
        beside = [of_group[g] for g in rollout.group.tolist()]
        scores = [
            score
            if other.ok
            else Score.failed(f"the greedy reply it is compared with failed: {other.error}")
            for score, other in zip(rollout.scores, beside, strict=True)
        ]
        values = [math.nan if other.value is None else other.value for other in beside]
        greedy = torch.tensor(values, dtype=torch.float64)
        return replace(rollout, scores=scores, greedy=greedy)


class Local:
    def __init__(
        self,
        recipe: Recipe,
        algorithm: Algorithm,
        sampler: Sampler,
        rewards: RewardService,
        stream: Stream,
        progress: Progress = SILENT,
    ) -> None:
        self.recipe = recipe
        self.algorithm = algorithm
        self.sampler = sampler
        self.rewards = rewards
        self.stream = stream
        self.progress = progress

    def collect(self, step: int) -> Pending:
        """Batch `step` as the recipe sizes it."""
        return self.draw(step, self.recipe.data.groups, self.algorithm.group)

    def refill(self, step: int, attempt: int, groups: int) -> Pending:
        """So many groups more for batch `step`, of prompts from a stream of their own."""
        stream = Stream(self.stream.parts, seed_of(self.recipe.seed, "refill", attempt))
        prompts = stream.batch(step, self.recipe.data.groups)[:groups]
        what = f"{groups} groups more"
        return self._batch(prompts, step, self.algorithm.group, ("refill", attempt), what)

    def draw(self, step: int, groups: int, group: int) -> Pending:
        """Draw `groups` prompts of batch `step`, `group` samples each, with the sampler's weights.
        Every finished piece goes to the rewards at once: scoring overlaps with drawing."""
        what = f"batch {step + 1}"
        return self._batch(self.stream.batch(step, groups), step, group, ("sample",), what)

    def _batch(
        self,
        prompts: Sequence[Prompt],
        step: int,
        group: int,
        use: tuple[str | int, ...],
        what: str,
    ) -> Pending:
        seed = self.recipe.seed
        row = [i for i in range(len(prompts)) for _ in range(group)]
        seeds = [seed_of(seed, *use, step, i) for i in range(len(row))]
        spec = self.algorithm.spec(step, seed_of(seed, "spec", step), self.recipe.model)
        batch = self._stream(prompts, row, seeds, spec, what)
        greedy = self.algorithm.greedy_spec()
        if greedy is None:
            return batch
        each = list(range(len(prompts)))
        drawn = self._stream(prompts, each, [0] * len(each), greedy, f"{what}, greedy")
        return replace(batch, greedy=drawn)

    def evaluate(
        self, prompts: Sequence[Prompt], weights: Which
    ) -> tuple[list[Sample], list[Score]]:
        """One sample a prompt, always from the same seeds."""
        spec = self.algorithm.eval_spec(self.recipe.eval, self.recipe.model, weights)
        row = list(range(len(prompts)))
        seeds = [seed_of(self.recipe.seed, "eval", i) for i in row]
        drawn = self._stream(prompts, row, seeds, spec, "the evaluation", held_out=True)
        rollout, _ = drawn.result()
        return list(rollout.samples), list(rollout.scores)

    def _stream(
        self,
        prompts: Sequence[Prompt],
        row: Sequence[int],
        seeds: Sequence[int],
        spec: SampleSpec | ReplySpec,
        what: str,
        held_out: bool = False,
    ) -> Pending:
        self.progress.phase(f"sampling {what}", len(row))
        started = time.perf_counter()
        pieces, futures = [], []
        with self._cores_shared():
            for piece in self.sampler.sample(prompts, row, seeds, spec):
                pieces.append(piece)
                futures.append(self.rewards.submit(piece.samples, held_out))
                self.progress.advance(len(piece.samples))
        drawn = time.perf_counter()
        group = torch.tensor(row)
        weights = {entry.label: entry.weight for entry in self.recipe.reward}
        version = self.sampler.version
        return Pending(
            pieces, futures, group, version, weights, started, drawn, self.progress, what
        )

    def memory(self) -> float:
        """GB (10⁹ bytes): the most that tensors took of a GPU since this was asked last; on a CPU
        the most that this process ever had; not a number where nobody can tell."""
        device = self.sampler.model.device
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            return peak / 1e9
        if sys.platform == "win32":
            return math.nan  # there is no way to ask without another package
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak * (1 if sys.platform == "darwin" else 1024) / 1e9  # bytes there, KiB elsewhere

    @contextmanager
    def _cores_shared(self) -> Iterator[None]:
        """While reward workers run on the same cores, waiting torch threads must not spin. Where
        they do (torch was imported before gesso), leave every worker a core of its own: spinning
        threads that outnumber the cores run many times slower."""
        passive = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
        on_cpu = self.sampler.model.device.type == "cpu"
        if on_cpu:
            _keep_freed_memory()
        if passive or not on_cpu:
            yield
            return
        threads = torch.get_num_threads()
        torch.set_num_threads(max(1, threads - self.rewards.processes))
        try:
            yield
        finally:
            torch.set_num_threads(threads)


@functools.cache
def _keep_freed_memory() -> None:
    """On a CPU every pass frees and takes again the same hundred megabytes. glibc hands them back
    to the system in between and pays page faults for it, a tenth of an iteration; told to keep
    them, it does not. Other C libraries have no such setting and need none."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
    mallopt(mmap_threshold, 32 * 2**20)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 64 * 2**20)

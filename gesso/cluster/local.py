"""Everything in this process: sampling and updates here, rewards in worker processes beside it."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gesso.algorithms.base import Algorithm
from gesso.config import Recipe
from gesso.data.prompts import Stream
from gesso.rewards.service import RewardService, Scored
from gesso.samplers.denoise import DenoisingSampler, Piece
from gesso.types import FlowTrace, Prompt, Rollout, Sample, SampleSpec, Score, Which, seed_of


def eval_spec(recipe: Recipe, weights: Which) -> SampleSpec:
    """How pictures are drawn to be looked at: no noise, the evaluation's steps and guidance."""
    assert recipe.eval.guidance is not None, "build.recipe_from fills it in"
    return SampleSpec(
        steps=recipe.eval.steps,
        height=recipe.model.height,
        width=recipe.model.width,
        guidance=recipe.eval.guidance,
        weights=weights,
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

    def result(self) -> tuple[Rollout, Timing]:
        waiting = time.perf_counter()
        scored = [future.result() for future in self.futures]
        done = time.perf_counter()
        first, last = min(s.started for s in scored), max(s.ended for s in scored)
        timing = Timing(
            sample=self.drawn - self.started,
            score=last - first,
            overlap=max(0.0, min(self.drawn, last) - first),
            wait=done - waiting,
        )
        rollout = Rollout(
            samples=[sample for piece in self.pieces for sample in piece.samples],
            group=self.group,
            trace=FlowTrace.concat([piece.trace for piece in self.pieces]),
            logp=torch.cat([piece.logp for piece in self.pieces]),
            version=self.version,
            scores=[score for s in scored for score in s.scores],
            weights=self.weights,
        )
        return rollout, timing


class Local:
    def __init__(
        self,
        recipe: Recipe,
        algorithm: Algorithm,
        sampler: DenoisingSampler,
        rewards: RewardService,
        stream: Stream,
    ) -> None:
        self.recipe = recipe
        self.algorithm = algorithm
        self.sampler = sampler
        self.rewards = rewards
        self.stream = stream

    def collect(self, step: int) -> Pending:
        """Batch `step` as the recipe sizes it."""
        return self.draw(step, self.recipe.data.groups, self.algorithm.group)

    def draw(self, step: int, groups: int, group: int) -> Pending:
        """Draw `groups` prompts of batch `step`, `group` samples each, with the sampler's weights.
        Every finished piece goes to the rewards at once: scoring overlaps with drawing."""
        seed = self.recipe.seed
        prompts = self.stream.batch(step, groups)
        row = [i for i in range(len(prompts)) for _ in range(group)]
        seeds = [seed_of(seed, "sample", step, i) for i in range(len(row))]
        spec = self.algorithm.spec(
            step, seed_of(seed, "spec", step), self.recipe.model.height, self.recipe.model.width
        )
        return self._stream(prompts, row, seeds, spec)

    def evaluate(
        self, prompts: Sequence[Prompt], weights: Which
    ) -> tuple[list[Sample], list[Score]]:
        """One picture a prompt, always from the same seeds, without noise."""
        spec = eval_spec(self.recipe, weights)
        row = list(range(len(prompts)))
        seeds = [seed_of(self.recipe.seed, "eval", i) for i in row]
        rollout, _ = self._stream(prompts, row, seeds, spec).result()
        return list(rollout.samples), list(rollout.scores)

    def _stream(
        self, prompts: Sequence[Prompt], row: Sequence[int], seeds: Sequence[int], spec: SampleSpec
    ) -> Pending:
        started = time.perf_counter()
        pieces, futures = [], []
        with self._cores_shared():
            for piece in self.sampler.sample(prompts, row, seeds, spec):
                pieces.append(piece)
                futures.append(self.rewards.submit(piece.samples))
        drawn = time.perf_counter()
        group = torch.tensor(row)
        weights = {entry.name: entry.weight for entry in self.recipe.reward}
        return Pending(pieces, futures, group, self.sampler.version, weights, started, drawn)

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
        workers = sum(entry.workers for entry in self.recipe.reward)
        torch.set_num_threads(max(1, threads - workers))
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

"""Measures the rates of workers on this machine: steps of several sizes by one real worker and, on
a CPU, steps by two, from whose timeline come the costs of several workers. They take turns, as the
speed of a machine changes. Weights do not change, and nothing is saved."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, NamedTuple

from gesso import build, clock
from gesso.cluster.placement import THREADS, place
from gesso.config import Cluster, Recipe
from gesso.data.prompts import LargestPrompt
from gesso.plan.planner import divided
from gesso.plan.rates import Line, Rates
from gesso.plan.simulate import Prediction, simulate
from gesso.plan.virtual import slots
from gesso.run import Assembled, assemble
from gesso.timeline import recorder
from gesso.timeline.steps import Step
from gesso.track.progress import SILENT, Progress
from gesso.types import Sample, Scales

ROUNDS = 5
SIZES = 3  # of a step: the recipe's, and halves of it
PAIR = 2
STILL = Scales(lr=0.0)  # trained weights would sample longer or shorter responses
SAMPLED, UPDATED = ("sample", "decode"), ("update", "wait")  # phases of real workers
MOST_SLOWED, CLOSE = 4.0, 0.01  # the factor by which one worker slows another, and its error


class Size(NamedTuple):
    """Of a step."""

    groups: int
    group: int

    @property
    def samples(self) -> int:
        return self.groups * self.group


@dataclass(frozen=True)
class Measured:
    rates: Rates
    longest: int  # mean tokens of a response with its share of the prompt; 0 for images
    memory: Mapping[int, float]  # peak bytes of a worker, by number of workers
    largest: LargestPrompt | None = None  # of the data

    def rates_of(self, recipe: Recipe, workers: int) -> Rates:
        """The rates of each of these workers. A collective of n workers moves 2(n − 1)/n of its
        data in and out of each; a single worker compares no digests."""
        rates, more = self.rates, 2 * (workers - 1) / workers
        return replace(
            rates,
            reduce=rates.reduce * more,
            share=rates.share * more,
            publish=rates.publish if workers > 1 else 0.0,
        )


def measure(recipe: Recipe, progress: Progress = SILENT) -> Measured:
    meter = Meter(recipe, progress)
    try:
        progress.phase("measuring")
        for _ in range(ROUNDS):
            meter.measure()
        return meter.result()
    finally:
        meter.close()


class Meter:
    """One worker and, on a CPU, two others. On a CPU each has one thread."""

    def __init__(self, recipe: Recipe, progress: Progress = SILENT) -> None:
        uncached = [entry.model_copy(update={"cache": False}) for entry in recipe.reward]
        recipe = recipe.model_copy(update={"reward": uncached})
        alone = _with_workers(recipe, 1)
        placement = place(alone, build.algorithm(alone))
        assert placement is not None
        on_cpu = not placement.gpus
        self.cores = _cores() if on_cpu else math.inf
        self.pair: Assembled | None = None
        self._times: dict[Size, list[Step]] = defaultdict(list)  # of one worker
        self._of_pair: list[Step] = []
        self._scoring: list[float] = []
        self._steps = {1: itertools.count(), PAIR: itertools.count()}  # by workers
        self._memory: dict[int, float] = {}  # by workers
        with _one_thread() if on_cpu else nullcontext():
            self.one = assemble(alone, progress)
            try:
                self.samples = self._warm_up(self.one)
                self.longest = _longest(self.one, self.samples)
                if on_cpu:
                    sized = divided(recipe, PAIR, self.longest)
                    self.pair = assemble(_with_workers(sized, PAIR), progress)
                    self._warm_up(self.pair)
            except BaseException:
                self.close()
                raise

    def _warm_up(self, job: Assembled) -> Sequence[Sample]:
        """Compiles, allocates, connects."""
        return self._step(job, sizes(job.recipe)[0]).samples

    def _step(self, job: Assembled, size: Size) -> Timed:
        workers = PAIR if job is self.pair else 1
        timed = _step(job, next(self._steps[workers]), size)
        self._memory[workers] = max(self._memory.get(workers, 0.0), timed.memory)
        return timed

    def measure(self) -> None:
        """One more round."""
        for size in sizes(self.one.recipe):
            self._times[size].append(self._step(self.one, size).step)
        if self.pair is not None:
            self._of_pair.append(self._step(self.pair, sizes(self.pair.recipe)[0]).step)
        started = time.perf_counter()
        self.one.cluster.rewards.score(self.samples)
        self._scoring.append(time.perf_counter() - started)

    def result(self) -> Measured:
        rates = of_one(self.one.recipe, self._times)
        rates = replace(rates, score=self._score, cores=self.cores)
        if self.pair is not None:
            rates = of_pair(self.pair.recipe, rates, self._of_pair, self.longest)
        return Measured(rates, self.longest, self._memory, self.one.largest)

    @property
    def _score(self) -> float:
        """Seconds of one sample. Rewards on this machine share its cores."""
        entries = self.one.recipe.reward
        at_once = float(min(map(slots, entries), default=1))
        if any(entry.remote is None for entry in entries):
            at_once = min(at_once, self.cores)
        return median(self._scoring) / len(self.samples) * at_once

    def close(self) -> None:
        for job in (self.one, self.pair):
            if job is not None:
                job.close()


def _cores() -> int:
    return len(os.sched_getaffinity(0))


@contextmanager
def _one_thread() -> Iterator[None]:
    """For the workers that are started meanwhile."""
    given = os.environ.get(THREADS)
    os.environ[THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[THREADS]
        if given is not None:
            os.environ[THREADS] = given


def _with_workers(recipe: Recipe, count: int) -> Recipe:
    cluster = Cluster(workers=count, patience=recipe.cluster.patience)
    return recipe.model_copy(update={"cluster": cluster})


@dataclass(frozen=True)
class Timed:
    step: Step
    samples: Sequence[Sample]
    memory: float  # peak bytes of a worker


def sizes(recipe: Recipe) -> Sequence[Size]:
    """The recipe's first. The last one has half a part: if all parts were equally large, their
    costs and those of samples could not be told apart."""
    algorithm, groups = build.algorithm(recipe), recipe.data.groups
    group, half = algorithm.group, max(1, recipe.sampler.batch // 2)
    whole = [Size(max(1, groups // 2**i), group) for i in range(SIZES)]
    small = Size(max(1, half // group), group if algorithm.whole_groups else min(group, half))
    return list(dict.fromkeys([*whole, small]))


def _step(job: Assembled, number: int, size: Size) -> Timed:
    """A step as in the loop, of this size."""
    recorder.take()
    cluster, started = job.cluster, clock.seconds()
    rollout, _ = cluster.sample_step(number, *size).result()
    cluster.describe(rollout)
    update = cluster.train(rollout.rows(rollout.scored), number, STILL)
    cluster.publish(number + 1)
    step = Step.of(number, 0.0, started, clock.seconds(), recorder.take())
    return Timed(step, rollout.samples, update.metrics["memory/gb"] * 1e9)


def of_one(recipe: Recipe, steps: Mapping[Size, Sequence[Step]]) -> Rates:
    """The rates of one worker, from its steps of several sizes."""
    algorithm, batch = build.algorithm(recipe), recipe.sampler.batch
    updates = algorithm.updates * algorithm.epochs
    terms = algorithm.terms_a_sample * algorithm.epochs
    sampling = [
        (math.ceil(size.samples / batch), size.samples, _median(found, SAMPLED))
        for size, found in steps.items()
    ]
    updating = [
        (updates, size.samples * terms, _median(found, UPDATED))
        for size, found in steps.items()
        if size.group == algorithm.group and size.samples >= algorithm.updates
    ]
    part, sample = fitted(sampling)
    optimizer, term = fitted(updating)
    most = max(steps)
    return Rates(
        sample=Line(sample, part),
        encode=_median(steps[most], ("encode",)) / most.groups,
        update=Line(term),
        optimizer=optimizer,
        between=median(map(_between, steps[most])) / most.samples,
    )


def of_pair(sized: Recipe, rates: Rates, steps: Sequence[Step], longest: int) -> Rates:
    """With what several workers cost: they exchange samples, gradients and digests, and slow each
    other down."""
    algorithm = build.algorithm(sized)

    def common(phase: str) -> float:
        """Seconds of both workers without waiting for each other: the last one to arrive does not
        wait."""
        return median(min(row.get(phase, 0.0) for row in _rows(step)) for step in steps)

    rates = replace(
        rates,
        share=common("exchange") / (sized.data.groups * algorithm.group),
        reduce=common("wait") / (algorithm.updates * algorithm.epochs),
        publish=common("publish"),
    )

    def slower(field: str, real: float, simulated: Callable[[Prediction], float]) -> float:
        """The factor with which simulated workers take as long as real ones."""
        low, high = 1.0, MOST_SLOWED
        while high - low > CLOSE:
            middle = (low + high) / 2
            changed: dict[str, Any] = {field: middle}
            found = simulate(sized, PAIR, replace(rates, **changed), longest)
            low, high = (middle, high) if simulated(found) < real else (low, middle)
        return low

    return replace(
        rates,
        slower_sampling=slower(
            "slower_sampling", _median(steps, SAMPLED), lambda found: found.seconds(*SAMPLED)
        ),
        slower_updating=slower("slower_updating", _median(steps, UPDATED), _duration_of_update),
    )


def fitted(times: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """a, b ≥ 0 for which a·x + b·y is closest to t, relative to it, for all (x, y, t)."""
    rows = [(x / t, y / t) for x, y, t in times if t]
    xx, xy, yy = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    x1, y1 = (sum(r[i] for r in rows) for i in (0, 1))
    determinant = xx * yy - xy * xy
    if determinant > 1e-9 * xx * yy:
        a, b = (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
        if a >= 0 and b >= 0:
            return a, b
        if b < 0:
            return x1 / xx, 0.0
    return 0.0, y1 / yy if yy else 0.0


def _rows(step: Step) -> Sequence[Mapping[str, float]]:
    """Seconds of each worker, by phase."""
    return [phases for row, phases in step.busy.items() if row.startswith(recorder.worker(0)[:-1])]


def _seconds(row: Mapping[str, float], phases: Sequence[str]) -> float:
    return sum(row.get(phase, 0.0) for phase in phases)


def _median(steps: Sequence[Step], phases: Sequence[str]) -> float:
    """Seconds of the average worker in a typical step."""
    return median(fmean(_seconds(row, phases) for row in _rows(step)) for step in steps)


def _between(step: Step) -> float:
    """Seconds in which a single worker waits for the driver, except for scores."""
    (row,) = _rows(step)
    accounted = _seconds(row, ("encode", *SAMPLED, *UPDATED))
    return max(0.0, step.seconds - accounted - _seconds(step.busy.get("driver", {}), ("wait",)))


def _duration_of_update(found: Prediction) -> float:
    """With the time that workers wait for each other."""
    spans = [s for s in found.spans if s.phase in ("update", "exchange")]
    return max(s.end for s in spans) - min(s.start for s in spans)


def _longest(job: Assembled, samples: Sequence[Sample]) -> int:
    """Its share of the longest prompt: the driver does not know the mean."""
    if job.largest is None or job.largest.tokens is None:
        return 0
    response = fmean(sample.tokens or 0 for sample in samples)
    return math.ceil(response + job.largest.tokens / job.algorithm.group)

"""Measures the rates of workers on this machine. One worker samples, scores and trains on small
batches of two sizes. The overhead of several workers is taken from the timeline of two real ones.
Nothing is saved."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from gesso import clock
from gesso.config import Cluster, Recipe, TokenModel
from gesso.plan.planner import divided
from gesso.plan.rates import Line, Rates
from gesso.plan.simulate import simulate
from gesso.plan.virtual import slots
from gesso.rollout import Rollout
from gesso.run import Assembled, assemble
from gesso.timeline import recorder
from gesso.timeline.steps import Step
from gesso.track.progress import SILENT, Progress
from gesso.types import UNSCALED

ROUNDS = 5
PAIR = 2  # workers whose timeline is measured


@dataclass(frozen=True)
class Measured:
    rates: Rates
    longest: int  # mean tokens of a response with its share of the prompt; 0 for images
    cores: int | None  # that CPU workers divide; None on a GPU
    sampling: float = 1.0  # factor by which sampling is slower with other workers: caches, memory
    updating: float = 1.0
    longest_prompt: int | None = None  # tokens; None for image models

    def rates_of(self, recipe: Recipe, workers: int) -> Rates:
        """The rates of each of these workers. Workers share the cores. A collective of n workers
        moves 2(n − 1)/n of its data in and out of each."""
        slower = 1.0 if self.cores is None else max(1.0, workers / self.cores)
        rates, more = self.rates, slower * 2 * (workers - 1) / workers
        sampling = slower * (self.sampling if workers > 1 else 1.0)
        updating = slower * (self.updating if workers > 1 else 1.0)
        return replace(
            rates,
            sample=Line(rates.sample.each * sampling, rates.sample.fixed * sampling),
            encode=rates.encode * slower,
            update=Line(rates.update.each * updating, rates.update.fixed * updating),
            optimizer=rates.optimizer * updating,
            reduce=rates.reduce * more,
            share=rates.share * more,
            publish=rates.publish * slower
            if workers > 1
            else 0.0,  # a single worker compares no digests
        )


def measure(recipe: Recipe, progress: Progress = SILENT) -> Measured:
    """On a CPU with one thread, as `OMP_NUM_THREADS=1` gives each worker."""
    alone = recipe.model_copy(update={"cluster": Cluster()})
    threads = torch.get_num_threads()
    job = assemble(alone, progress)
    try:
        on_cpu = job.model.device.type == "cpu"
        if on_cpu:
            torch.set_num_threads(1)
        progress.phase("measuring one worker")
        rates, rollout = _rates(job)
        longest = _longest(rollout) if isinstance(recipe.model, TokenModel) else 0
    finally:
        torch.set_num_threads(threads)
        job.close()
    found = Measured(rates, longest, None)
    if on_cpu:
        found = _with_pair(recipe, rates, longest, progress)
    return replace(found, longest_prompt=job.longest_prompt)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _rates(job: Assembled) -> tuple[Rates, Rollout]:
    recipe, algorithm = job.recipe, job.algorithm
    group = algorithm.group
    groups = max(2, math.ceil(recipe.sampler.batch / group))
    rollout, _ = job.local.sample_step(0, groups, group).result()  # loads and compiles
    numbers = itertools.count(1)
    sizes = max(1, groups // 2), groups
    small, large = (_fastest(partial(_sampling, job, n, numbers)) for n in sizes)
    half = rollout.rows(torch.arange(max(1, groups // 2) * group))
    job.local.train(rollout, 0, UNSCALED)  # allocates the optimizer's state
    short, long = (_fastest(partial(_training, job, r)) for r in (half, rollout))
    started = time.perf_counter()
    job.cluster.rewards.score(rollout.samples)
    scoring = time.perf_counter() - started
    steps = algorithm.updates * algorithm.epochs
    terms = algorithm.terms_a_sample * algorithm.epochs
    more = len(rollout.samples) - len(half.samples)
    each = max(0.0, long - short) / more
    return Rates(
        sample=_line(len(half.samples), small, len(rollout.samples), large, recipe.sampler.batch),
        update=Line(each / terms),
        optimizer=max(0.0, long - each * len(rollout.samples)) / steps,
        score=scoring / len(rollout.samples) * min(map(slots, recipe.reward), default=1),
    ), rollout


def _line(n: int, small: float, m: int, large: float, batch: int) -> Line:
    """The line through two measured points, with a fixed part per batch."""
    each = max(0.0, large - small) / (m - n)
    return Line(each, max(0.0, large - m * each) / math.ceil(m / batch))


def _fastest(work: Callable[[], float]) -> float:
    """Seconds of the fastest rounds: other programs make a round slower, never faster."""
    times = sorted(work() for _ in range(ROUNDS))
    return median(times[:2])


def _seconds(job: Assembled) -> float:
    """On a CPU the CPU seconds of this process, since other programs may use the cores, too."""
    return time.process_time() if job.model.device.type == "cpu" else time.perf_counter()


def _sampling(job: Assembled, groups: int, steps: Iterator[int]) -> float:
    """Seconds to sample a new step (features of known images are cached), without encoding the
    prompts, since every worker encodes all of them."""
    step = next(steps)
    prompts, sampler = job.local.stream.batch(step, groups), job.local.sampler
    spec = job.algorithm.spec(step, 0, job.recipe.model)
    sampler.shared(prompts, spec)  # embeddings may be cached, too
    started = _seconds(job)
    pending = job.local.sample_step(step, groups, job.algorithm.group)
    sampled = _seconds(job) - started
    started = _seconds(job)
    sampler.shared(prompts, spec)
    encoded = _seconds(job) - started
    pending.result()
    return sampled - encoded


def _training(job: Assembled, rollout: Rollout) -> float:
    started = _seconds(job)
    job.local.train(rollout, 0, UNSCALED)
    if job.model.device.type == "cuda":
        torch.cuda.synchronize(job.model.device)
    ended = _seconds(job)
    job.local.publish(1)  # the sampler must have the newest weights
    return ended - started


def _with_pair(recipe: Recipe, rates: Rates, longest: int, progress: Progress) -> Measured:
    """Adds the overhead of two workers: each encodes all prompts, they exchange samples, gradients
    and digests, and they slow each other down."""
    cluster = Cluster(workers=PAIR, patience=recipe.cluster.patience)
    sized = divided(recipe, PAIR, longest).model_copy(update={"cluster": cluster})
    job = assemble(sized, progress)
    try:
        progress.phase("measuring two workers")
        steps = [_step(job, number) for number in range(1 + ROUNDS)]
    finally:
        job.close()
    algorithm = job.algorithm
    samples, updates = recipe.data.groups * algorithm.group, algorithm.updates * algorithm.epochs

    def least(phase: str) -> float:
        """Least seconds of any worker in any step: other programs only add to it."""
        rows = [s.busy[recorder.worker(rank)] for s in steps[1:] for rank in range(PAIR)]
        return min(row.get(phase, 0.0) for row in rows)

    rates = replace(
        rates,
        encode=least("encode") / recipe.data.groups,
        share=least("exchange") / samples,
        reduce=least("wait") / updates,
        publish=least("publish"),
    )
    fastest = min(steps[1:], key=lambda step: step.seconds)
    predicted = simulate(sized, PAIR, rates, longest)

    def slower(real: Sequence[str], phases: Sequence[str]) -> float:
        rows = [fastest.busy[recorder.worker(rank)] for rank in range(PAIR)]
        seconds = sum(row.get(phase, 0.0) for row in rows for phase in real) / PAIR
        expected = predicted.step * sum(predicted.shares.get(phase, 0.0) for phase in phases)
        return max(1.0, seconds / expected)

    sampling = slower(("sample", "decode"), ("sample",))
    updating = slower(("update", "wait"), ("update", "exchange"))
    return Measured(rates, longest, _cores(), sampling, updating)


def _step(job: Assembled, number: int) -> Step:
    recorder.take()
    started = clock.seconds()
    batch = job.cluster.collect(number).result()
    job.cluster.update(batch, number)
    job.cluster.publish(number + 1)
    return Step.of(number, 0.0, started, clock.seconds(), recorder.take())


def _longest(rollout: Rollout) -> int:
    trace = rollout.token_trace
    prompts = sum(len(prompt) for prompt in trace.prompts) / len(trace.prompts)
    group = len(rollout.samples) / len(trace.prompts)
    return math.ceil(float(trace.mask.sum(1).float().mean()) + prompts / group)

"""The rates of one worker on this machine: a small batch is sampled, scored and trained on twice,
in two sizes. Nothing is saved."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from gesso.config import Cluster, Recipe, TokenModel
from gesso.plan.rates import Line, Rates
from gesso.plan.virtual import slots
from gesso.rollout import Rollout
from gesso.run import Assembled, assemble
from gesso.track.progress import SILENT, Progress
from gesso.types import UNSCALED

ROUNDS = 3


@dataclass(frozen=True)
class Measured:
    rates: Rates
    longest: int  # mean tokens of a response with its share of the prompt; 0 for images
    cores: int | None  # that CPU workers divide; None on a GPU

    def rates_of(self, recipe: Recipe, workers: int) -> Rates:
        """More workers than cores take turns. Collectives are not included."""
        slower = 1.0 if self.cores is None else max(1.0, workers / self.cores)
        rates = self.rates
        return replace(
            rates,
            sample=Line(rates.sample.each * slower, rates.sample.fixed * slower),
            update=Line(rates.update.each * slower, rates.update.fixed * slower),
            optimizer=rates.optimizer * slower,
            publish=rates.publish * slower,
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
        progress.phase("measuring")
        rates, rollout = _rates(job)
        longest = _longest(rollout) if isinstance(recipe.model, TokenModel) else 0
    finally:
        torch.set_num_threads(threads)
        job.close()
    return Measured(rates, longest, len(os.sched_getaffinity(0)) if on_cpu else None)


def _rates(job: Assembled) -> tuple[Rates, Rollout]:
    recipe, algorithm = job.recipe, job.algorithm
    group = algorithm.group
    groups = max(2, math.ceil(recipe.sampler.batch / group))
    rollout, _ = job.local.sample_step(0, groups, group).result()  # loads and compiles
    small, large = (_fastest(partial(_sampling, job, n)) for n in (max(1, groups // 2), groups))
    half = rollout.rows(torch.arange(max(1, groups // 2) * group))
    job.local.train(rollout, 0, UNSCALED)  # allocates the optimizer's state
    short, long = (_fastest(partial(_training, job, r)) for r in (half, rollout))
    started = time.perf_counter()
    job.local.publish(1)
    published = time.perf_counter() - started
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
        publish=published,
        score=scoring / len(rollout.samples) * min(map(slots, recipe.reward), default=1),
    ), rollout


def _line(n: int, small: float, m: int, large: float, batch: int) -> Line:
    """Through two measured points; the fixed part is of each batch."""
    each = max(0.0, large - small) / (m - n)
    return Line(each, max(0.0, large - m * each) / math.ceil(m / batch))


def _fastest(work: Callable[[], float]) -> float:
    """Other programs make a round slower, never faster: the median of few would follow them."""
    times = sorted(work() for _ in range(ROUNDS))
    return median(times[:2])


def _sampling(job: Assembled, groups: int) -> float:
    _, timing = job.local.sample_step(0, groups, job.algorithm.group).result()
    return timing.sample


def _training(job: Assembled, rollout: Rollout) -> float:
    started = time.perf_counter()
    job.local.train(rollout, 0, UNSCALED)
    if job.model.device.type == "cuda":
        torch.cuda.synchronize(job.model.device)
    job.local.publish(1)  # the sampler must have the newest weights
    return time.perf_counter() - started


def _longest(rollout: Rollout) -> int:
    trace = rollout.token_trace
    prompts = sum(len(prompt) for prompt in trace.prompts) / len(trace.prompts)
    group = len(rollout.samples) / len(trace.prompts)
    return math.ceil(float(trace.mask.sum(1).float().mean()) + prompts / group)

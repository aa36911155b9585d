"""Compares numbers of workers, batch sizes, sharding and lag, and chooses among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from gesso import build, families, fitting
from gesso.config import Recipe
from gesso.estimate import estimates, usable
from gesso.memory.meta import Role
from gesso.plan.gpus import NODE, Gpu, known
from gesso.plan.rates import Rates
from gesso.plan.simulate import Prediction, simulate, simulate_separate
from gesso.track.progress import SILENT, Progress
from gesso.types import UserError

MOST = 1024  # workers
WORTH = 0.95  # ratio of step times below which older samples (lag = 1) are worth it

RatesOf = Callable[[Recipe, int], Rates]


@dataclass(frozen=True)
class Option:
    """Settings with their prediction."""

    recipe: Recipe
    workers: int
    prediction: Prediction
    memory: Mapping[Role, float]  # bytes at the peak of a worker; empty: not estimated

    @property
    def peak(self) -> float | None:
        """Of the role that needs most."""
        return max(self.memory.values(), default=None)

    @property
    def hours(self) -> float:
        """Of a whole run, with its evaluations."""
        every, steps = self.recipe.eval.every, self.recipe.steps
        evaluations = 2 + (steps - 1) // every if every else 2
        total = steps * self.prediction.step + evaluations * self.prediction.evaluation
        return total / 3600

    @property
    def settings(self) -> list[str]:
        """Overrides of the recipe that is planned."""
        recipe, cluster = self.recipe, self.recipe.cluster
        chosen = [f"cluster.workers={self.workers - cluster.samplers}"]
        chosen += [f"cluster.samplers={cluster.samplers}"] if cluster.samplers else []
        if cluster.sharding is not None:
            chosen.append(f"cluster.sharding={cluster.sharding}")
            within = cluster.shard_within
            chosen += [f"cluster.shard_within={within}"] if within else []
        chosen.append(f"sampler.batch={recipe.sampler.batch}")
        micro = "micro_batch" if families.of(recipe).name == "flow" else "micro_tokens"
        chosen.append(f"learner.{micro}={getattr(recipe.learner, micro)}")
        return [*chosen, f"lag={recipe.lag}"]


@dataclass(frozen=True)
class Plan:
    best: Option
    alternatives: Sequence[Option]  # of as many workers
    scaling: Sequence[Option]  # of other numbers of workers
    notes: Sequence[str]


@dataclass(frozen=True)
class Planner:
    """`longest`: tokens of a response with its prompt. `gpu` is None for workers as measured on
    this machine, which have no limit of memory."""

    recipe: Recipe
    rates_of: RatesOf
    longest: int
    gpu: Gpu | None = None
    progress: Progress = SILENT
    _memory: dict[Hashable, dict[Role, float]] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return self.recipe.data.groups * build.algorithm(self.recipe).group

    def plan(self, count: int) -> Plan:
        if not 1 <= count <= MOST:
            raise UserError(f"--gpus expects 1 to {MOST}, got {count}")
        samplers = self.recipe.cluster.samplers
        if samplers >= count:
            raise UserError(
                f"--gpus {count} leaves no GPU for training, since cluster.samplers = {samplers}; "
                f"use at least {samplers + 1}"
            )
        fitted, how = self._fitting(count)
        notes = []
        useful = min(count, self.samples)
        if useful < count:
            notes.append(
                f"a step has {self.samples} samples, so {count - useful} of {count} GPUs would "
                "be idle; raise data.groups, which also changes the training"
            )
        here = [self._option(fitted, useful, lag) for lag in (0, 1)]
        gain = here[1].prediction.step / here[0].prediction.step
        best = here[1] if gain < WORTH else here[0]
        other = [option for option in here if option is not best]
        if smaller := self._smaller(best):
            other.append(self._option(smaller, useful, best.recipe.lag, fixed=True))
        counts = [2**i for i in range(11) if 2**i <= self.samples and (2**i > 1 or not samplers)]
        within = fitted.cluster.shard_within or 1
        scaling = [
            best
            if n == useful
            else self._option(_with_samplers(fitted, n, count), n, best.recipe.lag)
            for n in sorted({*counts, useful})
            if n % within == 0
        ]
        limit = usable(self.gpu.memory) if self.gpu else math.inf
        fitting_rows = [option for option in scaling if (option.peak or 0) < limit]
        fastest = min(fitting_rows, key=lambda option: option.prediction.step, default=best)
        if fastest.prediction.step < WORTH * best.prediction.step:
            notes.append(
                f"{fastest.workers} GPUs would be faster: {fastest.prediction.step:.3g} s per step "
                f"instead of {best.prediction.step:.3g} s"
            )
        if how:
            notes.insert(0, f"{_gb(best.peak or 0)} of {_gb(limit)} {how}")
        return Plan(best, other, fitting_rows, notes)

    def _option(self, recipe: Recipe, workers: int, lag: int, fixed: bool = False) -> Option:
        self.progress.phase(f"simulating {workers} workers")
        sized = recipe if fixed else divided(recipe, workers, self.longest)
        sized = sized.model_copy(update={"lag": lag})
        samplers = sized.cluster.samplers
        if not samplers:
            prediction = simulate(sized, workers, self.rates_of(sized, workers), self.longest)
        else:
            rates = [self.rates_of(sized, n) for n in (workers - samplers, samplers)]
            prediction = simulate_separate(sized, workers, rates[0], rates[1], self.longest)
        return Option(sized, workers, prediction, self.memory(sized, workers))

    def memory(self, recipe: Recipe, workers: int) -> dict[Role, float]:
        """Peak bytes of each role of a worker. Cached: plans that differ only in the number of
        workers often need the same memory."""
        placed = _of_workers(recipe, workers)
        shards = recipe.cluster.sharding and (recipe.cluster.shard_within or workers)
        batches = recipe.sampler.batch, recipe.learner.micro_batch, recipe.learner.micro_tokens
        separate = recipe.cluster.samplers and (recipe.cluster.samplers, recipe.lag)
        key = (*batches, shards, separate)
        if key not in self._memory:
            self.progress.phase("estimating memory")
            try:
                found = estimates(placed)
            except UserError:
                if self.gpu is not None:
                    raise
                found = {}  # a user's own model, measured on this machine
            self._memory[key] = {role: float(m.peak) for role, m in found.items()}
        return self._memory[key]

    def _smaller(self, option: Option) -> Recipe | None:
        """The recipe with batches half as large."""
        batch = option.recipe.sampler.batch // 2
        return _sized(option.recipe, batch) if batch else None

    def _fitting(self, count: int) -> tuple[Recipe, str]:
        """The recipe with batch sizes and sharding that fit into memory, and a description."""
        if self.gpu is None:
            return self.recipe, ""
        limit, name = usable(self.gpu.memory), self.gpu.name
        tried = [self.recipe, *_sharded(self.recipe, count)]
        peaks: list[float] = []
        for recipe in tried:
            sized = divided(recipe, min(count, self.samples), self.longest)
            peaks.append(max(self.memory(sized, count).values()))
            if peaks[-1] < limit:
                kind = recipe.cluster.sharding
                how = (
                    f'sharded weights (cluster.sharding = "{kind}")'
                    if kind
                    else "replicated weights"
                )
                return recipe, f"on {name}: {how}"
        for recipe in tried:
            try:
                fitted = fitting.fit(_of_workers(recipe, count), self.gpu.memory, self.progress)
            except UserError:
                continue
            smaller = fitting.with_settings(recipe, fitted.settings)
            text = f"{' '.join(fitted.overrides)}; the recipe's batches need {_gb(peaks[0])}"
            return smaller, f"on {name} with {text}"
        raise UserError(_nowhere(min(peaks), self.gpu, count))


def _of_workers(recipe: Recipe, count: int) -> Recipe:
    learners = count - recipe.cluster.samplers
    cluster = recipe.cluster.model_copy(update={"workers": learners})
    return recipe.model_copy(update={"cluster": cluster})


def _with_samplers(recipe: Recipe, count: int, planned: int) -> Recipe:
    """The recipe with the same share of samplers among `count` workers."""
    if not (samplers := recipe.cluster.samplers):
        return recipe
    share = min(count - 1, max(1, round(samplers * count / planned)))
    cluster = recipe.cluster.model_copy(update={"samplers": share})
    return recipe.model_copy(update={"cluster": cluster})


def _sharded(recipe: Recipe, count: int) -> list[Recipe]:
    """The recipe sharded over the GPUs of one machine, which have fast links, and over all GPUs."""
    if recipe.cluster.sharding is not None or recipe.model.quantize is not None or count == 1:
        return []
    kind = "base" if recipe.model.lora is not None else "all"
    found = []
    samplers = recipe.cluster.samplers  # with them, all learners form one group
    for within in [None] if samplers else sorted({min(NODE, count), count}):
        if within is None or count % within == 0:
            update = {"sharding": kind, "shard_within": within}
            found.append(
                recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update=update)})
            )
    return found


def _nowhere(peak: float, gpu: Gpu, count: int) -> str:
    larger = [g.name for g in known().values() if usable(g.memory) > peak]
    fits = f"--gpu {larger[0]} has enough memory; or " if larger else ""
    machine = "one GPU" if count == 1 else f"each of {count} GPUs"
    return (
        f"the recipe needs at least {_gb(peak)} on {machine}, but a {gpu.name} leaves "
        f"{_gb(usable(gpu.memory))}; {fits}try more --gpus, model.gradient_checkpointing=true, "
        "model.lora.rank=16 or model.quantize=nf4"
    )


def divided(recipe: Recipe, workers: int, longest: int) -> Recipe:
    """With the largest batches, up to the recipe's, that minimise the work of the busiest
    worker."""
    algorithm = build.algorithm(recipe)
    samples, batch = recipe.data.groups * algorithm.group, recipe.sampler.batch
    sized = recipe
    samplers = recipe.cluster.samplers
    sampling, learners = samplers or workers, workers - samplers
    if samples >= sampling:
        sized = _sized(recipe, _best(samples, sampling, batch))
    if families.of(recipe).name == "flow":
        return sized
    mini = samples // algorithm.updates
    most = max(1, recipe.learner.micro_tokens // longest)
    micro = _best(mini, min(learners, mini), min(most, mini)) * longest
    learner = recipe.learner.model_copy(update={"micro_tokens": micro})
    return sized.model_copy(update={"learner": learner})


def _best(units: int, workers: int, most: int) -> int:
    """The size of parts, at most `most`, that minimises the units of the busiest worker."""
    sizes = [n for n in range(1, most + 1) if math.ceil(units / n) >= workers] or [1]
    return min(sizes, key=lambda n: (math.ceil(math.ceil(units / n) / workers) * n, -n))


def _sized(recipe: Recipe, batch: int) -> Recipe:
    """With sampling batches of this size. If an image model had equal micro-batches, they stay
    equal, so that sampling and updates round in the same way."""
    equal = recipe.sampler.batch == recipe.learner.micro_batch
    sampler = recipe.sampler.model_copy(update={"batch": batch})
    recipe = recipe.model_copy(update={"sampler": sampler})
    if not equal or families.of(recipe).name != "flow":
        return recipe
    learner = recipe.learner.model_copy(update={"micro_batch": batch})
    return recipe.model_copy(update={"learner": learner})


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"

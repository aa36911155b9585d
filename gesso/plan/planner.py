"""Compares numbers of workers and samplers, batch sizes, sharding and lag, and chooses."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from gesso import build, families, fitting
from gesso.config import Recipe
from gesso.data.prompts import ImageSizes
from gesso.estimate import estimate, roles, usable
from gesso.memory.meta import Role
from gesso.plan.gpus import NODE, Gpu, known
from gesso.plan.rates import Rates
from gesso.plan.simulate import DIVIDED, SAMPLING, Prediction, simulate, simulate_separate
from gesso.track.progress import SILENT, Progress
from gesso.types import UserError
from gesso.weights.folding_rule import estimated_on_gpu
from gesso.worker import undivided

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
    measured: Mapping[int, float] = field(default_factory=dict)
    """Peak bytes of a worker's process with the recipe's batches, by number of workers."""
    images: ImageSizes | None = None  # of every prompt, for estimates
    _memory: dict[Hashable, float] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return self.recipe.data.groups * build.algorithm(self.recipe).group

    def plan(self, count: int) -> Plan:
        notes = []
        useful = min(count, self.samples)
        if useful < count:
            notes.append(
                f"a step has {self.samples} samples, so {count - useful} of {count} GPUs would "
                "be idle; raise data.groups, which also changes the training"
            )
        self._check(useful)
        fitted, how = self._placed(self.recipe, useful) or self._with_smaller_batches(useful)
        best, *other = self._compared(fitted, useful)
        if smaller := self._smaller(best):
            other.append(self._option(smaller, useful, best.recipe.lag, fixed=True))
        scaling = self._scaling(best)
        fewer = [option for option in scaling if option.workers < useful]
        fastest = min(fewer, key=lambda option: option.prediction.step, default=best)
        if fastest.prediction.step < WORTH * best.prediction.step:
            notes.append(
                f"{fastest.workers} GPUs would be faster: {fastest.prediction.step:.3g} s per step "
                f"instead of {best.prediction.step:.3g} s"
            )
        if self.gpu is not None:
            notes.insert(0, f"{_gb(best.peak or 0)} of {_gb(usable(self.gpu.memory))} {how}")
        return Plan(best, other, scaling, notes)

    def _compared(self, recipe: Recipe, workers: int) -> list[Option]:
        """Lags, and separate samplers; the one that is chosen comes first."""
        options = [self._option(recipe, workers, lag) for lag in self._lags]
        options += self._separate(recipe, options[-1])
        best = options[0]
        for option in options[1:]:
            if option.prediction.step < WORTH * best.prediction.step:
                best = option
        return [best, *(option for option in options if option is not best)]

    def _scaling(self, best: Option) -> list[Option]:
        """The best of other numbers of workers where the recipe's batches fit, and `best`."""
        counts = {n for i in range(11) if (n := 2**i) <= self.samples}
        options = []
        for n in sorted({*counts, best.workers}):
            if n == best.workers:
                options.append(best)
            elif self._possible(n) and (placed := self._placed(self.recipe, n)):
                options.append(self._compared(placed[0], n)[0])
        return options

    def _check(self, count: int) -> None:
        """Raises a UserError for a number of workers on which the recipe cannot run."""
        samplers = self.recipe.cluster.samplers
        if samplers >= count:
            raise UserError(
                f"{count} GPUs leave none for training, since cluster.samplers = {samplers}; use "
                f"at least {samplers + 1}"
            )
        if not self._possible(count):
            within, parallel = self._units
            raise UserError(
                f"{count} GPUs cannot be divided by cluster.shard_within = {within} and "
                f"sampler.vllm.tensor_parallel = {parallel}; use another number"
            )

    def _possible(self, count: int) -> bool:
        (within, parallel), samplers = self._units, self.recipe.cluster.samplers
        learners = count - samplers
        return learners > 0 and learners % within == 0 and (samplers or count) % parallel == 0

    @property
    def _units(self) -> tuple[int, int]:
        """Numbers of workers that share weights in training, and an engine in sampling."""
        return self.recipe.cluster.shard_within or 1, self.recipe.sampler.vllm.tensor_parallel

    def _option(self, recipe: Recipe, workers: int, lag: int, fixed: bool = False) -> Option:
        sized = recipe if fixed else divided(recipe, workers, self.longest)
        sized = sized.model_copy(update={"lag": lag})
        return Option(sized, workers, self._predict(sized, workers), self.memory(sized, workers))

    def _predict(self, recipe: Recipe, workers: int) -> Prediction:
        self.progress.phase(f"simulating {workers} workers")
        samplers = recipe.cluster.samplers
        if not samplers:
            return simulate(recipe, workers, self.rates_of(recipe, workers), self.longest)
        training = self.rates_of(recipe, workers - samplers)
        sampling = self.rates_of(undivided(recipe), samplers)
        return simulate_separate(recipe, workers, training, sampling, self.longest)

    @property
    def _lags(self) -> tuple[int, ...]:
        """Refills and probes sample with the weights of the current step."""
        algorithm = build.algorithm(self.recipe)
        return (0,) if algorithm.refills or algorithm.probe else (0, 1)

    def _separate(self, recipe: Recipe, together: Option) -> list[Option]:
        """With the number of separate samplers that makes a step shortest, among some around the
        share of the workers' time that sampling takes. None where that is not possible, does not
        fit, or cannot pay: the samples and their update take most of a step."""
        workers, cluster, sampler = together.workers, recipe.cluster, recipe.sampler
        grouped = cluster.shard_within or sampler.vllm.tensor_parallel > 1
        given = cluster.samplers or sampler.engine == "data"
        if self.gpu is None or workers == 1 or not together.recipe.lag or grouped or given:
            return []
        shares = together.prediction.shares
        busy = sum(shares.get(phase, 0.0) for phase in DIVIDED)
        if cluster.sharding is None and busy > WORTH:
            return []
        sampling = sum(share for phase, share in shares.items() if phase in SAMPLING)
        near = round(workers * sampling / sum(shares.values()))
        options = []
        tried = (near - 1, near, near + 1, near * 3 // 2, near * 2)
        for samplers in {min(max(1, number), workers - 1) for number in tried}:
            placed = _with_samplers(recipe, samplers)
            sized = divided(placed, workers, self.longest).model_copy(update={"lag": 1})
            options.append((self._predict(sized, workers), sized))
        prediction, sized = min(options, key=lambda option: option[0].step)
        best = Option(sized, workers, prediction, self.memory(sized, workers))
        return [best] if (best.peak or 0) < usable(self.gpu.memory) else []

    def memory(self, recipe: Recipe, workers: int) -> dict[Role, float]:
        """Peak bytes of each role of a worker. An estimate counts tensors; what else a process
        needs is the difference to a measured one, of as many workers or the next fewer."""
        placed, more = _of_workers(recipe, workers), 0.0
        try:
            if self.measured:
                count = max(n for n in self.measured if n <= workers)
                recipe_of = divided(self.recipe, count, self.longest) if count > 1 else self.recipe
                more = self.measured[count] - self._peak(_of_workers(recipe_of, count), "worker")
            return {role: more + self._peak(placed, role) for role in roles(recipe)}
        except UserError:
            if self.gpu is not None:
                raise
            return {}  # a user's own model, measured on this machine

    def _peak(self, placed: Recipe, role: Role) -> float:
        """Cached by the settings that it depends on: most plans differ only in the number of
        workers. On a GPU the memory of a sampler depends on its batch alone."""
        cluster, learner = placed.cluster, placed.learner
        key: tuple[Hashable, ...] = role, placed.sampler.batch
        if role != "sampler":
            shards = cluster.sharding and (cluster.shard_within or cluster.workers)
            key += learner.micro_batch, learner.micro_tokens, shards
        if not estimated_on_gpu(placed.model, one_pass=False):
            key += (cluster.workers,)  # sums of gradients take memory
            key += cluster.samplers, placed.lag  # traces wait in the same memory
        if key not in self._memory:
            self.progress.phase("estimating memory")
            self._memory[key] = float(estimate(placed, role, self.images).peak)
        return self._memory[key]

    def _smaller(self, option: Option) -> Recipe | None:
        """The recipe with batches half as large."""
        recipe, batch = option.recipe, option.recipe.sampler.batch // 2
        equal = recipe.sampler.batch == recipe.learner.micro_batch
        flow = families.of(recipe).name == "flow"
        return _sized(recipe, batch, batch if equal and flow else None) if batch else None

    def _placed(self, recipe: Recipe, count: int) -> tuple[Recipe, str] | None:
        """With the first kind of sharding that fits into memory, and a description."""
        if self.gpu is None:
            return recipe, ""
        for each in [recipe, *_sharded(recipe, count)]:
            if self._needed(each, count) < usable(self.gpu.memory):
                kind = each.cluster.sharding
                how = (
                    f'sharded weights (cluster.sharding = "{kind}")'
                    if kind
                    else "replicated weights"
                )
                return each, f"on {self.gpu.name}: {how}"
        return None

    def _with_smaller_batches(self, count: int) -> tuple[Recipe, str]:
        """With the largest batches that fit into memory, and a description."""
        assert self.gpu is not None
        tried = [self.recipe, *_sharded(self.recipe, count)]
        needed = [self._needed(recipe, count) for recipe in tried]
        for recipe in tried:
            try:
                fitted = fitting.fit(_of_workers(recipe, count), self.gpu.memory, self.progress)
            except UserError:
                continue
            text = f"{' '.join(fitted.overrides)}; the recipe's batches need {_gb(needed[0])}"
            return fitting.with_settings(recipe, fitted.settings), f"on {self.gpu.name} with {text}"
        raise UserError(_nowhere(min(needed), self.gpu, count))

    def _needed(self, recipe: Recipe, count: int) -> float:
        """Bytes at the peak of a worker."""
        return max(self.memory(divided(recipe, count, self.longest), count).values())


def _of_workers(recipe: Recipe, count: int) -> Recipe:
    learners = count - recipe.cluster.samplers
    cluster = recipe.cluster.model_copy(update={"workers": learners})
    return recipe.model_copy(update={"cluster": cluster})


def _with_samplers(recipe: Recipe, samplers: int) -> Recipe:
    cluster = recipe.cluster.model_copy(update={"samplers": samplers})
    return recipe.model_copy(update={"cluster": cluster})


def _sharded(recipe: Recipe, count: int) -> list[Recipe]:
    """The recipe sharded over the GPUs of one machine, which have fast links, and over all GPUs."""
    learners = count - recipe.cluster.samplers
    if recipe.cluster.sharding is not None or recipe.model.quantize is not None or learners == 1:
        return []
    kind = "base" if recipe.model.lora is not None else "all"
    found = []
    for within in sorted({min(NODE, learners), learners}):
        if learners % within == 0:
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
    samplers = recipe.cluster.samplers
    sampling, learners = samplers or workers, workers - samplers
    mini = samples // algorithm.updates
    if families.of(recipe).name == "flow":
        # If both batches are equal, they stay equal: sampling and updates round in the same way.
        equal, micro = batch == recipe.learner.micro_batch, recipe.learner.micro_batch
        batch = _best(samples, sampling, batch) if samples >= sampling else batch
        terms = mini * algorithm.terms_a_sample
        micro = batch if equal else _best(terms, min(learners, terms), micro)
        return _sized(recipe, batch, micro)
    sized = _sized(recipe, _best(samples, sampling, batch)) if samples >= sampling else recipe
    limit = recipe.learner.micro_tokens
    each = _best(mini, min(learners, mini), min(max(1, limit // longest), mini))
    tokens = max(longest, min(limit, _tokens(mini, each, longest)))
    learner = recipe.learner.model_copy(update={"micro_tokens": tokens})
    return sized.model_copy(update={"learner": learner})


def _tokens(samples: int, each: int, longest: int) -> int:
    """The limit on a micro-batch with which samples become micro-batches of `each`, even though
    they differ in length: halfway from the mean to that of one micro-batch less."""
    fewer = math.ceil(samples / each) - 1
    mean = samples * longest / (fewer + 1)
    more = samples * longest / fewer if fewer else 3 * mean
    return max(each * longest, math.ceil((mean + more) / 2))


def _best(units: int, workers: int, most: int) -> int:
    """The size of parts, at most `most`, that minimises the units of the busiest worker."""
    sizes = [n for n in range(1, most + 1) if math.ceil(units / n) >= workers] or [1]
    return min(sizes, key=lambda n: (math.ceil(math.ceil(units / n) / workers) * n, -n))


def _sized(recipe: Recipe, batch: int, micro: int | None = None) -> Recipe:
    """With sampling batches and, for an image model, micro-batches of this size."""
    sampler = recipe.sampler.model_copy(update={"batch": batch})
    recipe = recipe.model_copy(update={"sampler": sampler})
    if micro is None:
        return recipe
    learner = recipe.learner.model_copy(update={"micro_batch": micro})
    return recipe.model_copy(update={"learner": learner})


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"

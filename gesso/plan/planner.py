"""Compares numbers of workers, batch sizes, sharding and lag, and chooses among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gesso import build, families, fitting
from gesso.config import Recipe
from gesso.estimate import Memory, estimate, usable
from gesso.plan.gpus import NODE, Gpu, known
from gesso.plan.rates import Rates
from gesso.plan.simulate import Prediction, simulate
from gesso.track.progress import SILENT, Progress
from gesso.types import UserError

MOST = 1024  # workers
WORTH = 0.95  # a step must become this much shorter for samples that are one update old

RatesOf = Callable[[Recipe, int], Rates]


@dataclass(frozen=True)
class Option:
    """Settings, and what they are predicted to give."""

    recipe: Recipe
    workers: int
    prediction: Prediction
    memory: float | None  # bytes at the peak of a worker, at most

    @property
    def hours(self) -> float:
        """Of a whole run with its evaluations."""
        every, steps = self.recipe.eval.every, self.recipe.steps
        evaluations = 2 + (steps - 1) // every if every else 2
        total = steps * self.prediction.step + evaluations * self.prediction.evaluation
        return total / 3600

    @property
    def settings(self) -> list[str]:
        """Overrides of the recipe that is planned."""
        recipe, chosen = self.recipe, [f"cluster.workers={self.workers}"]
        cluster = recipe.cluster
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
    this machine, whose memory is not compared."""

    recipe: Recipe
    rates_of: RatesOf
    longest: int
    gpu: Gpu | None = None
    progress: Progress = SILENT

    @property
    def samples(self) -> int:
        return self.recipe.data.groups * build.algorithm(self.recipe).group

    def plan(self, count: int) -> Plan:
        if not 1 <= count <= MOST:
            raise UserError(f"--gpus expects 1 to {MOST}, got {count}")
        fitted, memory, notes = self._fitting(count)
        useful = min(count, self.samples)
        if useful < count:
            notes.append(
                f"a step has {self.samples} samples, so {count - useful} of {count} GPUs would "
                "have nothing to do; raise data.groups, which changes what is trained"
            )
        here = [self._option(fitted, useful, memory, lag) for lag in (0, 1)]
        gain = here[1].prediction.step / here[0].prediction.step
        best = here[1] if gain < WORTH else here[0]
        other = [option for option in here if option is not best]
        if smaller := self._smaller(best):
            other.append(self._option(smaller, useful, memory, best.recipe.lag, fixed=True))
        counts = [2**i for i in range(11) if 2**i <= self.samples]
        within = fitted.cluster.shard_within or 1
        scaling = [
            best if n == useful else self._option(fitted, n, memory, best.recipe.lag)
            for n in sorted({*counts, useful})
            if n % within == 0
        ]
        return Plan(best, other, scaling, notes)

    def _option(
        self, recipe: Recipe, workers: int, memory: Memory | None, lag: int, fixed: bool = False
    ) -> Option:
        self.progress.phase(f"simulating {workers} workers")
        sized = recipe if fixed else divided(recipe, workers, self.longest)
        sized = sized.model_copy(update={"lag": lag})
        prediction = simulate(sized, workers, self.rates_of(sized, workers), self.longest)
        return Option(sized, workers, prediction, memory.peak if memory else None)

    def _smaller(self, option: Option) -> Recipe | None:
        """Half the batches."""
        batch = option.recipe.sampler.batch // 2
        return _sized(option.recipe, batch) if batch else None

    def _fitting(self, count: int) -> tuple[Recipe, Memory | None, list[str]]:
        """The recipe with batches and sharding for which a worker has the memory."""
        if self.gpu is None:
            return self.recipe, None, []
        limit, name = usable(self.gpu.memory), self.gpu.name
        self.progress.phase("estimating memory")
        tried = [self.recipe, *_sharded(self.recipe, count)]
        found: list[Memory] = []
        for recipe in tried:
            found.append(memory := estimate(_of_workers(recipe, count)))
            if memory.peak < limit:
                kind = recipe.cluster.sharding
                how = f'weights divided (cluster.sharding = "{kind}")' if kind else "whole weights"
                return recipe, memory, [f"{_gb(memory.peak)} of {_gb(limit)} on a {name}: {how}"]
        for recipe in tried:
            try:
                fitted = fitting.fit(_of_workers(recipe, count), self.gpu.memory, self.progress)
            except UserError:
                continue
            smaller = fitting.with_settings(recipe, fitted.settings)
            text = f"batches of the recipe need {_gb(found[0].peak)}; {' '.join(fitted.overrides)}"
            return smaller, fitted.memory, [f"{text} fits a {name}"]
        raise UserError(_nowhere(min(m.peak for m in found), self.gpu, count))


def _of_workers(recipe: Recipe, count: int) -> Recipe:
    cluster = recipe.cluster.model_copy(update={"workers": count})
    return recipe.model_copy(update={"cluster": cluster})


def _sharded(recipe: Recipe, count: int) -> list[Recipe]:
    """Over the GPUs of a machine, which have the fast links, then over all."""
    if recipe.cluster.sharding is not None or recipe.model.quantize is not None or count == 1:
        return []
    kind = "base" if recipe.model.lora is not None else "all"
    found = []
    for within in sorted({min(NODE, count), count}):
        if count % within == 0:
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
    """With the largest batches, up to those of the recipe, for which no worker has more to do than
    with any other."""
    algorithm = build.algorithm(recipe)
    samples, batch = recipe.data.groups * algorithm.group, recipe.sampler.batch
    sized = recipe
    if samples >= workers:
        sized = _sized(recipe, _best(samples, workers, batch))
    if families.of(recipe).name == "flow":
        return sized
    mini = samples // algorithm.updates
    most = max(1, recipe.learner.micro_tokens // longest)
    micro = _best(mini, min(workers, mini), min(most, mini)) * longest
    learner = recipe.learner.model_copy(update={"micro_tokens": micro})
    return sized.model_copy(update={"learner": learner})


def _best(units: int, workers: int, most: int) -> int:
    """The size of parts, at most `most`, whose largest share of `units` is smallest."""
    sizes = [n for n in range(1, most + 1) if math.ceil(units / n) >= workers] or [1]
    return min(sizes, key=lambda n: (math.ceil(math.ceil(units / n) / workers) * n, -n))


def _sized(recipe: Recipe, batch: int) -> Recipe:
    """Sampling in batches of this size. Updates of an image model, too, if they were alike: they
    then round alike."""
    alike = recipe.sampler.batch == recipe.learner.micro_batch
    sampler = recipe.sampler.model_copy(update={"batch": batch})
    recipe = recipe.model_copy(update={"sampler": sampler})
    if not alike or families.of(recipe).name != "flow":
        return recipe
    learner = recipe.learner.model_copy(update={"micro_batch": batch})
    return recipe.model_copy(update={"learner": learner})


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"

"""Runs the training loop for a few steps of virtual time."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from gesso import build, clock, families
from gesso.algorithms.base import Algorithm
from gesso.cluster.placement import Placement
from gesso.cluster.workers import Workers
from gesso.config import Cluster, Recipe, TokenModel
from gesso.data.curriculum import stream_of
from gesso.data.prompts import WeightedPrompts
from gesso.loop import Loop
from gesso.plan.cores import shared
from gesso.plan.rates import Rates
from gesso.plan.virtual import Clock, Load, Span, VirtualProcesses, VirtualRewards
from gesso.track.progress import SILENT
from gesso.track.run_folder import RunFolder
from gesso.types import Prompt

SAMPLING = ("open", "sample", "decode", "receive", "wait for scores")
DIVIDED = ("sample", "decode", "update")
"""Phases that workers divide among themselves; what remains of a step can overlap."""


@dataclass(frozen=True)
class Prediction:
    step: float  # seconds of a training step
    evaluation: float  # seconds of an evaluation
    shares: dict[str, float]  # of a step, by phase, for the average worker; the rest is idle
    waiting: float  # share of a step spent waiting for scores
    spans: Sequence[Span]  # of that step

    def seconds(self, *phases: str) -> float:
        """Of a step, in these phases, of the average worker."""
        return self.step * sum(self.shares.get(phase, 0.0) for phase in phases)

    @property
    def idle(self) -> float:
        return max(0.0, 1 - sum(self.shares.values()))


def simulate(recipe: Recipe, workers: int, rates: Rates, longest: int) -> Prediction:
    """`longest`: tokens of a response with its prompt; without effect on image models."""
    algorithm = build.algorithm(recipe)
    measured = 1 + recipe.lag  # the step that is reported; earlier ones fill the queue
    steps = measured + 1 + recipe.lag  # so that batches ahead of it are sampled
    short: dict[str, Any] = {
        "steps": steps,
        "on_symptom": {},
        "eval": recipe.eval.model_copy(update={"every": 0, "shown": 0}),
        "save": recipe.save.model_copy(update={"every": steps, "groups": 0}),
    }
    recipe = recipe.model_copy(update=short)
    time, devices = Clock(), shared(rates.cores)
    processes = VirtualProcesses(workers, rates, load(recipe, algorithm, longest), time, devices)
    rewards = VirtualRewards(recipe, rates.score, time, devices)
    marks: list[float] = []

    def between_steps() -> bool:
        marks.append(time.now)
        return len(marks) > measured  # so that nothing else is simulated

    with clock.reading(time.seconds), tempfile.TemporaryDirectory() as folder:
        cluster = Workers(
            recipe,
            algorithm,
            cast(Any, processes),
            cast(Any, rewards),
            stream_of([WeightedPrompts(_prompts(recipe.data.groups * steps), 1.0)], recipe),
            families.of(recipe).gathers_to_sample,
            Placement(workers, (), threads=1, parts=0),
        )
        run = RunFolder.create(Path(folder) / "run", recipe.model_dump())
        Loop(
            recipe,
            algorithm,
            cluster,
            _prompts(recipe.eval.prompts),
            run,
            SILENT,
            should_stop=between_steps,
        ).train()
        rows = run.rows()
    start, end = marks[measured - 1], marks[measured]
    spans = [s for s in (*processes.spans, *rewards.spans) if start <= s.start < end]
    seconds: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.rank >= 0:
            seconds[span.phase] += span.seconds
    waiting = sum(s.seconds for s in spans if s.phase == "wait for scores")
    return Prediction(
        end - start,
        rows[0]["time/eval"],
        {phase: value / workers / (end - start) for phase, value in seconds.items()},
        waiting / (end - start),
        spans,
    )


def simulate_separate(
    recipe: Recipe, workers: int, training: Rates, sampling: Rates, longest: int
) -> Prediction:
    """With `cluster.samplers`: samplers and learners are simulated separately. Their parts of a
    step overlap if lag is not 0."""
    samplers = recipe.cluster.samplers
    together = recipe.model_copy(update={"cluster": Cluster(), "lag": 0})
    sampled = simulate(together, samplers, sampling, longest)
    unevaluated = recipe.eval.model_copy(update={"prompts": 1})  # evaluations are the samplers'
    sharded = together.model_copy(update={"cluster": recipe.cluster, "eval": unevaluated})
    trained = simulate(sharded, workers - samplers, training, longest)
    seconds: dict[str, float] = defaultdict(float)
    phases: list[float] = []  # of the samplers, of the learners
    for found, samples in ((sampled, True), (trained, False)):
        spans = [s for s in found.spans if (s.phase in SAMPLING) == samples]
        start = min(s.start for s in found.spans)
        end = max((s.end for s in found.spans if s.phase in SAMPLING), default=start)
        phases.append(end - start if samples else found.step - (end - start))
        for span in spans:
            if span.rank >= 0:
                seconds[span.phase] += span.seconds
    step = (max(phases) if recipe.lag else sum(phases)) + training.send
    shares = {phase: value / workers / step for phase, value in seconds.items()}
    waiting = sampled.waiting * sampled.step / step
    return Prediction(step, sampled.evaluation, shares, 0.0 if recipe.lag else waiting, ())


def load(recipe: Recipe, algorithm: Algorithm, longest: int) -> Load:
    micro, of_tokens = recipe.learner.micro_batch, isinstance(recipe.model, TokenModel)
    if of_tokens:
        micro = max(1, recipe.learner.micro_tokens // longest)
    return Load(
        algorithm.updates,
        algorithm.epochs,
        algorithm.terms_a_sample,
        micro,
        recipe.cluster.sharding is not None,
        even=of_tokens,
    )


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(f"prompt {i}") for i in range(count)]

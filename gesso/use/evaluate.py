"""Scores on held-out prompts with confidence intervals, for one model or several on the same
prompts and seeds, with their differences."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso import build
from gesso.config import MAX_SAMPLES, DataSource, Expect, Recipe, RewardEntry
from gesso.data import prompts as data
from gesso.data.chat import ChatFormat
from gesso.rewards import assembly
from gesso.track.progress import SILENT, Progress
from gesso.types import Prompt, Sample, Score, UserError, eval_seed
from gesso.use.loaded import AS_EVALUATED, SampledModel, SamplingOptions
from gesso.use.notes import Once
from gesso.use.opening import open_to_sample
from gesso.use.source import ModelSource

if TYPE_CHECKING:
    from gesso.formulas.intervals import Interval
    from gesso.rewards.transport.service import RewardService

TOTAL = "reward"


@dataclass(frozen=True)
class EvaluationRequest:
    """What to evaluate. Empty or None: as in the recipe."""

    rewards: tuple[str, ...] = ()  # names, or "name,option=value"
    prompts: str | Path | Sequence[str] = ()  # a file, or texts
    n: int | None = None  # samples per prompt
    seed: int | None = None
    first: int | None = None  # number of prompts, from the first
    settings: SamplingOptions = AS_EVALUATED

    def __post_init__(self) -> None:
        for name, got in (("n", self.n), ("first", self.first)):
            if got is not None and got < 1:
                raise UserError(f"eval expects {name} of at least 1, got {name} = {got}")
        if self.n is not None and self.n > MAX_SAMPLES:
            raise UserError(
                f"eval expects n of at most {MAX_SAMPLES:,} samples per prompt, got n = {self.n}"
            )


@dataclass(frozen=True)
class Evaluation:
    """N samples of P prompts, prompt by prompt, n of each."""

    name: str
    prompts: Sequence[Prompt]  # P
    samples: Sequence[Sample]  # N
    scores: Sequence[Score]  # N
    row: Sequence[int] = field(repr=False)  # N: sample → prompt

    @property
    def errors(self) -> list[str]:
        """The errors of samples without a score."""
        bad = (score for score in self.scores if not score.ok)
        return [score.error or "the reward returned no finite number" for score in bad]

    @cached_property
    def figures(self) -> list[str]:
        """Names of the metrics; the total comes first if there are several rewards."""
        names = list(dict.fromkeys(n for score in self.scores if score.ok for n in score.parts))
        rewards = [name for name in names if "/" not in name]
        return names if len(rewards) == 1 else [TOTAL, *names]

    def values(self, figure: str = TOTAL) -> list[float | None]:
        """N values; None where a sample has no score, or the reward does not apply to it."""
        return [_value(score, figure) for score in self.scores]

    def interval(self, figure: str = TOTAL) -> Interval:
        """Mean, standard error and 95% interval by the bootstrap over prompts."""
        return _over_prompts(self.values(figure), self.row, len(self.prompts))

    def minus(self, other: Evaluation, figure: str = TOTAL) -> tuple[Interval, int]:
        """The mean difference over samples of the same prompt and seed that both have scores, and
        the number of such pairs."""
        assert [p.text for p in self.prompts] == [p.text for p in other.prompts]
        pairs = zip(self.values(figure), other.values(figure), strict=True)
        values = [None if a is None or b is None else a - b for a, b in pairs]
        count = sum(value is not None for value in values)
        return _over_prompts(values, self.row, len(self.prompts)), count

    def __str__(self) -> str:
        return table([self])


@dataclass(frozen=True)
class Scoring:
    """Rewards, prompts and seed of an evaluation."""

    rewards: Sequence[RewardEntry]
    sources: Sequence[DataSource]  # empty if the request has texts
    texts: Sequence[str]
    first: int | None
    seed: int
    n: int  # samples per prompt


def evaluate(
    loaded: SampledModel, request: EvaluationRequest, progress: Progress = SILENT
) -> Evaluation:
    """Evaluates one loaded model."""
    scoring = _scoring(loaded.source, request)
    rewards = _rewards(scoring, loaded.source)
    try:
        check_groups(rewards, scoring.n)
        return _evaluate(loaded, scoring, rewards, request, progress)
    finally:
        rewards.service.close()


def evaluate_all(
    sources: Sequence[ModelSource], request: EvaluationRequest, progress: Progress = SILENT
) -> list[Evaluation]:
    """Evaluates several models on the prompts, rewards and seeds of the first. Each is loaded,
    sampled from and released before the next."""
    if len({source.recipe.model.family_name for source in sources}) > 1:
        raise UserError("cannot compare flow models with language models; compare one kind only")
    progress, scoring = Once(progress), _scoring(sources[0], request)
    rewards = _rewards(scoring, sources[0])
    evaluations: list[Evaluation] = []
    try:
        check_groups(rewards, scoring.n)
        for source in sources:
            loaded = open_to_sample(source, progress)
            try:
                evaluations.append(_evaluate(loaded, scoring, rewards, request, progress))
            finally:
                loaded.close()
            del loaded
            free()
            _check_same(evaluations[0], evaluations[-1])
    finally:
        rewards.service.close()
    return evaluations


def _check_same(first: Evaluation, other: Evaluation) -> None:
    texts = [{prompt.text for prompt in each.prompts} for each in (first, other)]
    if texts[0] != texts[1]:
        prompt = min(texts[0] ^ texts[1])
        raise UserError(
            f"{first.name} and {other.name} do not accept the same prompts; remove this prompt: "
            f"{prompt!r}"
        )


def free() -> None:
    """Release the memory of models that are no longer referenced."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _scoring(source: ModelSource, request: EvaluationRequest) -> Scoring:
    """The request, completed by the recipe of the first model."""
    training = source.training
    options = {"prompts": request.prompts, "rewards": request.rewards}
    missing = [name for name, given in options.items() if not given and training is None]
    if missing:
        raise UserError(
            f"{source.name} has no recipe, so {' and '.join(missing)} must be specified; add "
            "--prompts FILE and --reward NAME"
        )
    entries = [reward_entry(name, training) for name in request.rewards]
    sources: Sequence[DataSource] = ()
    texts: Sequence[str] = ()
    first = request.first
    if not request.prompts:
        assert training is not None, "checked above"
        sources, first = training.data.eval, first or training.eval.prompts
    elif isinstance(request.prompts, str | Path):
        sources = [DataSource(path=str(request.prompts))]
    else:
        texts = request.prompts
    if not entries:
        assert training is not None, "checked above"
        source.announce_code("reward")
        entries = training.eval_reward or training.reward
    seed = source.recipe.seed if request.seed is None else request.seed
    n = request.n or (1 if training is None else training.eval.samples)
    return Scoring(entries, sources, texts, first, seed, n)


def _rewards(scoring: Scoring, source: ModelSource) -> assembly.Rewards:
    recipe = source.recipe
    return assembly.of_entries([], scoring.rewards, recipe.model, recipe.eval.frames)


def check_groups(rewards: assembly.Rewards, n: int) -> None:
    """Raises if rewards that compare the samples of a prompt would get only one."""
    names = rewards.service.groupwise(held_out=True)
    if names and n < 2:
        raise UserError(
            f'the reward "{names[0]}" compares the samples of a prompt and requires at least 2 of '
            f"each, got n = {n}; add --n 4"
        )


def reward_entry(text: str, recipe: Recipe | None) -> RewardEntry:
    """A reward by its name: the entry of the recipe if there is one, else a new entry with options
    after commas: "ocr,detect=false"."""
    name, *options = text.split(",")
    entries = () if recipe is None else (*recipe.eval_reward, *recipe.reward)
    for entry in entries:
        if entry.name == name and not options:
            return entry.model_copy(update={"weight": 1.0})
    return assembly.reward_entry(name, options, workers=1)


def _evaluate(
    loaded: SampledModel,
    scoring: Scoring,
    rewards: assembly.Rewards,
    request: EvaluationRequest,
    progress: Progress,
) -> Evaluation:
    progress.phase("reading prompts")
    prompts, n = _prompts(loaded, scoring, rewards, progress), scoring.n
    row = [i for i in range(len(prompts)) for _ in range(n)]
    seeds = [eval_seed(scoring.seed, i, j) for i in range(len(prompts)) for j in range(n)]
    samples, scores = sample_and_score(
        loaded, rewards.service, prompts, row, seeds, request.settings, progress
    )
    return Evaluation(loaded.source.name, prompts, samples, scores, row)


def sample_and_score(
    loaded: SampledModel,
    service: RewardService,
    prompts: Sequence[Prompt],
    row: Sequence[int],
    seeds: Sequence[int],
    settings: SamplingOptions,
    progress: Progress,
) -> tuple[list[Sample], list[Score]]:
    """Like `SampledModel.draw`; finished samples are scored while others are generated."""
    scoring = service.begin(row, held_out=True)

    def submit(piece: Any) -> None:
        scoring.add(piece.index, piece.samples)

    samples = loaded.draw(prompts, row, seeds, settings, progress, submit)
    progress.phase("scoring", scoring.pending)
    return samples, scoring.result(progress.advance).scores


def _prompts(
    loaded: SampledModel, scoring: Scoring, rewards: assembly.Rewards, progress: Progress
) -> list[Prompt]:
    """The prompts of the request, formatted as in the recipe of this model."""
    unfit = rewards.held_out.unfit
    if scoring.texts:
        path, report = "this request", data.LoadReport()
        texts = [
            replace(loaded.ask(text), where=f"prompt {i}")
            for i, text in enumerate(scoring.texts, 1)
        ]
        prompts = data.fit(texts, unfit, path, report)
    else:
        path = " and ".join(source.path for source in scoring.sources)
        form = ChatFormat.of(loaded.recipe.data)
        given = build.given(loaded.recipe)
        prompts, report = data.from_sources(scoring.sources, form, unfit, given)
    prompts = loaded.fitting(prompts, path, report)
    for note in report.notes:
        progress.note(note)
    return prompts[: scoring.first]


def _value(score: Score, figure: str) -> float | None:
    if not score.ok:
        return None
    return score.value if figure == TOTAL else score.parts.get(figure)


def _over_prompts(values: Iterable[float | None], row: Sequence[int], prompts: int) -> Interval:
    import torch

    from gesso.formulas.intervals import clustered

    pairs = [(i, v) for i, v in zip(row, values, strict=True) if v is not None]
    index = torch.tensor([i for i, _ in pairs], dtype=torch.long)
    given = torch.tensor([v for _, v in pairs], dtype=torch.float64)
    sums = torch.zeros(prompts, dtype=torch.float64).index_add_(0, index, given)
    return clustered(sums, torch.bincount(index, minlength=prompts))


def table(evaluations: Sequence[Evaluation], expect: Expect | None = None) -> str:
    """For a terminal. The first is compared with each of the others, and with what the authors of
    its recipe expect."""
    first = evaluations[0]
    n = len(first.samples) // len(first.prompts)
    lines = [
        f"{len(first.prompts)} prompts × {n} samples; 95% bootstrap intervals over prompts",
        "",
        f"{'':<34}{'mean':>9}{'std error':>10}   95% interval",
    ]
    for evaluation in evaluations:
        lines.append(f"{evaluation.name}  {_failed(evaluation)}")
        lines += [_line(figure, evaluation.interval(figure)) for figure in evaluation.figures]
    for other in evaluations[1:]:
        lines += ["", f"{first.name} minus {other.name}, paired by prompt and seed"]
        for figure in (name for name in first.figures if name in other.figures):
            interval, pairs = first.minus(other, figure)
            note = f"  {pairs} pairs" if pairs < len(first.samples) else ""
            lines.append(_line(figure, interval, "+") + note)
    if expect is not None and expect.figure in first.figures:
        lines += ["", expect.compared(first.interval(expect.figure).mean)]
    for evaluation in evaluations:
        if evaluation.errors:
            lines += ["", f"{evaluation.name}: last error: {evaluation.errors[-1]}"]
    return "\n".join(lines)


def _failed(evaluation: Evaluation) -> str:
    count, total = len(evaluation.errors), len(evaluation.samples)
    if count == 0:
        return f"(0 of {total} scores failed)"
    return f"({count} of {total} scores failed, {count / total:.1%}; they are excluded)"


def _line(figure: str, interval: Interval, sign: str = "") -> str:
    def shown(value: float) -> str:
        return "–" if math.isnan(value) else f"{value:{sign}.3f}"

    error = "–" if math.isnan(interval.error) else f"{interval.error:.3f}"
    low, high = interval.low, interval.high
    span = "–" if math.isnan(low) else f"{shown(low)} to {shown(high)}"
    return f"  {figure:<32}{shown(interval.mean):>9}{error:>10}   {span:<18}".rstrip()


def summary(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """The same as data. A value that does not exist is null."""

    def numbers(interval: Interval) -> dict[str, Any]:
        values = vars(interval)
        return {key: None if math.isnan(value) else value for key, value in values.items()}

    first = evaluations[0]
    models = [
        {
            "name": each.name,
            "samples": len(each.samples),
            "failed": len(each.errors),
            "figures": {name: numbers(each.interval(name)) for name in each.figures},
        }
        for each in evaluations
    ]
    differences = []
    for other in evaluations[1:]:
        both = [name for name in first.figures if name in other.figures]
        figures = {}
        for name in both:
            interval, pairs = first.minus(other, name)
            figures[name] = numbers(interval) | {"pairs": pairs}
        differences.append({"of": first.name, "minus": other.name, "figures": figures})
    return {"prompts": len(first.prompts), "models": models, "differences": differences}

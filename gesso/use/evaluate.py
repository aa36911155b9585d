"""Scores of held-out prompts, with how sure they are; of several models on the same prompts and
seeds, and of what lies between them."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gesso import build, config
from gesso.data import prompts as data
from gesso.data.chat import ChatFormat
from gesso.track.progress import SILENT, Progress
from gesso.types import Prompt, Sample, Score, UserError, seed_of
from gesso.use.notes import Once
from gesso.use.source import Source
from gesso.use.trained import AS_EVALUATED, Drawing, Trained, opened

if TYPE_CHECKING:
    from gesso.formulas.intervals import Interval
    from gesso.rewards.transport.service import RewardService

TOTAL = "reward"


@dataclass(frozen=True)
class Asked:
    """What to evaluate on. Empty or None: as the recipe says."""

    rewards: tuple[str, ...] = ()  # names, or "name,option=value"
    prompts: str | Path | Sequence[str] = ()  # a file, or texts
    n: int = 1  # samples a prompt
    seed: int | None = None
    first: int | None = None  # so many prompts of the set
    drawing: Drawing = AS_EVALUATED

    def __post_init__(self) -> None:
        first = 1 if self.first is None else self.first
        if min(self.n, first) < 1:
            name, got = ("n", self.n) if self.n < 1 else ("first", first)
            raise UserError(f"evaluate at least one sample of one prompt, got {name} = {got}")
        if self.n > config.MAX_SAMPLES:
            raise UserError(
                f"evaluate at most {config.MAX_SAMPLES:,} samples of a prompt, got n = {self.n}"
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
        """Why samples have no score."""
        bad = (score for score in self.scores if not score.ok)
        return [score.error or "the reward gave no finite number" for score in bad]

    @cached_property
    def figures(self) -> list[str]:
        """Names of what was measured; the total first, where it is not the only reward."""
        names = list(dict.fromkeys(n for score in self.scores if score.ok for n in score.parts))
        rewards = [name for name in names if "/" not in name]
        return names if len(rewards) == 1 else [TOTAL, *names]

    def values(self, figure: str = TOTAL) -> list[float | None]:
        """N; None where a sample has no score, or the reward does not apply to it."""
        return [_value(score, figure) for score in self.scores]

    def interval(self, figure: str = TOTAL) -> Interval:
        """Mean, standard error and 95% interval, from prompts drawn anew."""
        return _over_prompts(self.values(figure), self.row, len(self.prompts))

    def minus(self, other: Evaluation, figure: str = TOTAL) -> tuple[Interval, int]:
        """The mean difference over samples of the same prompt and seed that have both scores, and
        how many such pairs there are."""
        assert [p.text for p in self.prompts] == [p.text for p in other.prompts]
        pairs = zip(self.values(figure), other.values(figure), strict=True)
        values = [None if a is None or b is None else a - b for a, b in pairs]
        count = sum(value is not None for value in values)
        return _over_prompts(values, self.row, len(self.prompts)), count

    def __str__(self) -> str:
        return table([self])


def evaluate(trained: Trained, asked: Asked, progress: Progress = SILENT) -> Evaluation:
    """One model that is loaded already."""
    recipe = _scoring(trained.source, asked)
    rewards = build.rewards(recipe)
    try:
        return _evaluate(trained, recipe, rewards, asked, progress)
    finally:
        rewards.service.close()


def evaluate_all(
    sources: Sequence[Source], asked: Asked, progress: Progress = SILENT
) -> list[Evaluation]:
    """Several models on the prompts, rewards and seeds of the first: one is loaded, drawn from and
    let go before the next."""
    families = {config.family(source.recipe.model) for source in sources}
    if len(families) > 1:
        raise UserError("one of these models draws and another writes; compare those of one kind")
    progress, recipe = Once(progress), _scoring(sources[0], asked)
    rewards = build.rewards(recipe)
    found = []
    try:
        for source in sources:
            trained = opened(source, progress)
            found.append(_evaluate(trained, recipe, rewards, asked, progress))
            del trained
            free()
            _check_same(found[0], found[-1])
    finally:
        rewards.service.close()
    return found


def _check_same(one: Evaluation, other: Evaluation) -> None:
    texts = [{prompt.text for prompt in each.prompts} for each in (one, other)]
    if texts[0] != texts[1]:
        odd = min(texts[0] ^ texts[1])
        raise UserError(
            f"{one.name} and {other.name} do not take the same prompts; leave this one out: {odd!r}"
        )


def free() -> None:
    """What a model that nobody holds any more has taken."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _scoring(source: Source, asked: Asked) -> config.Recipe:
    """The recipe whose prompts and rewards are evaluated on."""
    recipe = source.recipe
    missing = [
        told
        for given, told in ((asked.prompts, "prompts"), (asked.rewards, "rewards"))
        if not given and not source.complete
    ]
    if missing:
        raise UserError(
            f"{source.name} says nothing of {' and '.join(missing)}, as a run or a recipe would; "
            "give --prompts FILE and --reward NAME"
        )
    if asked.rewards:
        entries = [reward_entry(name, recipe) for name in asked.rewards]
    else:
        source.announce_code("reward")
        entries = recipe.eval_reward or recipe.reward
    return recipe.model_copy(update={"reward": entries, "eval_reward": []})


def reward_entry(asked: str, recipe: config.Recipe) -> config.RewardEntry:
    """A reward by its name: as the recipe has it if it does, else by itself, its options behind
    commas: "ocr,detect=false"."""
    name, *options = asked.split(",")
    for entry in (*recipe.eval_reward, *recipe.reward):
        if entry.name == name and not options:
            return entry.model_copy(update={"weight": 1.0})
    return build.reward_entry(name, options, workers=1)


def _evaluate(
    trained: Trained,
    recipe: config.Recipe,
    rewards: build.Rewards,
    asked: Asked,
    progress: Progress,
) -> Evaluation:
    progress.phase("reading prompts")
    chosen = _prompts(trained, recipe, rewards, asked, progress)
    seed = recipe.seed if asked.seed is None else asked.seed
    row = [i for i in range(len(chosen)) for _ in range(asked.n)]
    seeds = [eval_seed(seed, i, j) for i in range(len(chosen)) for j in range(asked.n)]
    made = drawn_and_scored(trained, rewards.service, chosen, row, seeds, asked.drawing, progress)
    return Evaluation(trained.source.name, chosen, *made, row)


def drawn_and_scored(
    trained: Trained,
    service: RewardService,
    asked: Sequence[Prompt],
    row: Sequence[int],
    seeds: Sequence[int],
    drawing: Drawing,
    progress: Progress,
) -> tuple[list[Sample], list[Score]]:
    """As `Trained.draw`; what is finished is scored while the rest is drawn."""
    futures: dict[tuple[int, ...], Any] = {}

    def submit(piece: Any) -> None:
        futures[tuple(piece.index)] = service.submit(piece.samples, held_out=True)

    samples = trained.draw(asked, row, seeds, drawing, progress, submit)
    progress.phase("scoring", len(row))
    scores: dict[int, Score] = {}
    for index, future in futures.items():
        scores |= zip(index, future.result().scores, strict=True)
        progress.advance(len(index))
    return samples, [scores[i] for i in range(len(row))]


def eval_seed(seed: int, prompt: int, sample: int) -> int:
    """The first sample of each prompt is the one that the run's own evaluations draw."""
    return seed_of(seed, "eval", prompt, sample) if sample else seed_of(seed, "eval", prompt)


def _prompts(
    trained: Trained,
    recipe: config.Recipe,
    rewards: build.Rewards,
    asked: Asked,
    progress: Progress,
) -> list[Prompt]:
    """Those of the first model, formed as this one's data are."""
    unfit = rewards.held_out.unfit
    if isinstance(asked.prompts, str | Path) or not asked.prompts:
        own = [config.Source(path=str(asked.prompts))] if asked.prompts else recipe.data.eval
        path = " and ".join(source.path for source in own)
        found, told = data.from_sources(own, ChatFormat.of(trained.recipe.data), unfit)
    else:
        path, told = "these", data.LoadReport()
        texts = [
            replace(trained.ask(text), where=f"prompt {i}")
            for i, text in enumerate(asked.prompts, 1)
        ]
        found = data.fit(texts, unfit, path, told)
    if trained.writes:
        found = trained.fitting(found, path, told)
    for note in told.notes:
        progress.note(note)
    count = asked.first or (None if asked.prompts else recipe.eval.prompts)
    return found[:count]


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


def table(found: Sequence[Evaluation]) -> str:
    """For a terminal. The first is compared with each of the others."""
    first = found[0]
    per = len(first.samples) // len(first.prompts)
    lines = [
        f"{len(first.prompts)} prompts × {per}; 95% intervals by drawing prompts anew",
        "",
        f"{'':<34}{'mean':>9}{'± error':>10}   95% interval",
    ]
    for one in found:
        lines.append(f"{one.name}  {_failed(one)}")
        lines += [_line(figure, one.interval(figure)) for figure in one.figures]
    for other in found[1:]:
        lines += ["", f"{first.name} minus {other.name}, sample by sample"]
        for figure in (name for name in first.figures if name in other.figures):
            interval, pairs = first.minus(other, figure)
            note = f"  {pairs} pairs" if pairs < len(first.samples) else ""
            lines.append(_line(figure, interval, "+") + note)
    for one in found:
        if one.errors:
            lines += ["", f"{one.name}: the last error: {one.errors[-1]}"]
    return "\n".join(lines)


def _failed(one: Evaluation) -> str:
    count, total = len(one.errors), len(one.samples)
    if count == 0:
        return f"(0 of {total} scores failed)"
    return f"({count} of {total} scores failed, {count / total:.1%}: they count in no figure)"


def _line(figure: str, told: Interval, sign: str = "") -> str:
    def shown(value: float) -> str:
        return "–" if math.isnan(value) else f"{value:{sign}.3f}"

    error = "–" if math.isnan(told.error) else f"{told.error:.3f}"
    span = "–" if math.isnan(told.low) else f"{shown(told.low)} to {shown(told.high)}"
    return f"  {figure:<32}{shown(told.mean):>9}{error:>10}   {span:<18}".rstrip()


def summary(found: Sequence[Evaluation]) -> dict[str, Any]:
    """The same for a program. A figure that does not exist is null."""

    def told(interval: Interval) -> dict[str, Any]:
        named = vars(interval)
        return {key: None if math.isnan(value) else value for key, value in named.items()}

    first = found[0]
    models = [
        {
            "name": one.name,
            "samples": len(one.samples),
            "failed": len(one.errors),
            "figures": {name: told(one.interval(name)) for name in one.figures},
        }
        for one in found
    ]
    differences = []
    for other in found[1:]:
        both = [name for name in first.figures if name in other.figures]
        figures = {}
        for name in both:
            interval, pairs = first.minus(other, name)
            figures[name] = told(interval) | {"pairs": pairs}
        differences.append({"of": first.name, "minus": other.name, "figures": figures})
    return {"prompts": len(first.prompts), "models": models, "differences": differences}

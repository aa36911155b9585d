"""The prompts of a recipe, and the batch of prompts of each step."""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from gesso.config import ChatSettings, Data, DataSource
from gesso.data.chat import ChatFormat
from gesso.data.given import GivenColumns
from gesso.data.images import InvalidRow, check_images
from gesso.data.readers import Reading, read
from gesso.data.rows import prompt_of, weight_of
from gesso.types import Prompt, PromptImage, UserError, seed_of


@dataclass(frozen=True)
class WeightedPrompts:
    """The prompts of one source and its sampling weight relative to the other sources."""

    prompts: Sequence[Prompt]
    weight: float = 1.0


ImageSizes = Sequence[Sequence[int]]
"""Height and width of each input image of a prompt."""


class LargestPrompt(NamedTuple):
    """Of a recipe's data. It decides how much memory a run needs."""

    tokens: int | None = None  # only of language models
    images: ImageSizes | None = None  # only of editing models


@dataclass(frozen=True)
class LoadedData:
    """The prompts of a recipe's `data` that can be scored."""

    train: Sequence[WeightedPrompts]
    held_out: Sequence[Prompt]  # of all sets, interleaved
    notes: Sequence[str]  # shown before the run
    left_out: Sequence[str] = ()  # "file:line: why" of every skipped row
    largest: LargestPrompt | None = None  # None: the memory does not depend on the prompts


Unfit = Callable[[Prompt], str | None]
"""Why a prompt cannot be scored, or None."""


def load(
    data: Data, unfit: Unfit, unfit_held_out: Unfit, given: GivenColumns | None = None
) -> LoadedData:
    """`given`: the columns of samples that training rows give. Held-out rows may have them, too."""
    report = LoadReport()
    chat_format = ChatFormat.of(data)
    train = [
        WeightedPrompts(_scored(source, chat_format, unfit, report, given), source.weight)
        for source in data.train
    ]
    held_out, held_out_report = from_sources(data.eval, chat_format, unfit_held_out, given)
    report.merge(held_out_report)
    report.add_note(overlap([p for part in train for p in part.prompts], held_out))
    return LoadedData(train, held_out, report.notes, report.left_out)


@dataclass(frozen=True)
class LoadReport:
    """Notes and skipped rows, collected while data is read."""

    notes: list[str] = field(default_factory=list)  # without duplicates
    left_out: list[str] = field(default_factory=list)  # rows, each with its reason

    def add_note(self, note: str | None) -> None:
        if note and note not in self.notes:
            self.notes.append(note)

    def merge(self, other: LoadReport) -> None:
        for note in other.notes:
            self.add_note(note)
        self.left_out.extend(other.left_out)


def from_sources(
    sources: Sequence[DataSource],
    chat_format: ChatFormat,
    unfit: Unfit,
    given: GivenColumns | None = None,
) -> tuple[list[Prompt], LoadReport]:
    """The prompts of several sets, interleaved, that can be scored, and a report on the others.
    Samples that their rows give are not used."""
    report = LoadReport()
    unused = None if given is None else replace(given, required=False)
    sets = [_scored(source, chat_format, unfit, report, unused) for source in sources]
    return interleave(sets), report


def _scored(
    source: DataSource,
    chat_format: ChatFormat,
    unfit: Unfit,
    report: LoadReport,
    given: GivenColumns | None,
) -> list[Prompt]:
    reading = read(source, chat_format, given)
    prompts, note = usable(reading, source.path)
    report.add_note(note)
    report.add_note(reading.unseen)
    report.left_out.extend(reading.left_out)
    return fit(prompts, unfit, source.path, report)


def usable(reading: Reading, path: str) -> tuple[list[Prompt], str | None]:
    """The prompts of a source, and a note if rows cannot be used."""
    if not reading.left_out:
        return reading.prompts, None
    example = f"the first is {reading.left_out[0]}"
    if not reading.prompts:
        raise UserError(f"no prompt of {path} can be used; {example}")
    count, total = len(reading.left_out), len(reading.left_out) + len(reading.prompts)
    return reading.prompts, f"{count} of {total} prompts of {path} are skipped; {example}"


def without(loaded: LoadedData, unfit: Unfit, data: Data, why: str) -> LoadedData:
    """The data without the prompts for which `unfit` returns a reason; these are reported."""
    report = LoadReport([*loaded.notes], [*loaded.left_out])
    train = [
        WeightedPrompts(fit(part.prompts, unfit, source.path, report, why), part.weight)
        for part, source in zip(loaded.train, data.train, strict=True)
    ]
    path = " and ".join(source.path for source in data.eval)
    held_out = fit(loaded.held_out, unfit, path, report, why)
    return LoadedData(train, held_out, report.notes, report.left_out)


def typed_prompt(
    text: str, images: Sequence[str | Path | bytes], data: Data | ChatSettings
) -> Prompt:
    """A typed prompt in the format of the data's rows; an image is a file or its bytes."""
    values = [image if isinstance(image, bytes) else str(image) for image in images]
    row = {"prompt": text} | ({"images": values} if values else {})
    where = "the prompt"
    try:
        prompt = prompt_of(row, where, DataSource(path=where), None, ChatFormat.of(data))
    except InvalidRow as error:
        raise UserError(f"{where}: {error}") from error
    (fault,) = check_images([prompt]).faults
    if fault:
        raise UserError(f"{where}: {fault}")
    return prompt


def fit(
    prompts: Sequence[Prompt],
    unfit: Unfit,
    path: str,
    report: LoadReport,
    why: str = "cannot be scored",
) -> list[Prompt]:
    """The prompts for which `unfit` returns None; the others are reported."""
    reasons = [(p, unfit(p)) for p in prompts]
    kept = [p for p, reason in reasons if not reason]
    if len(kept) == len(prompts):
        return kept
    rejected = [f"{p.where}: {reason}: {p.text[:60]}" for p, reason in reasons if reason]
    example = f"the first is {rejected[0]}"
    if not kept:
        raise UserError(f"no prompt of {path} can be used: they {why}; {example}")
    count = f"{len(rejected)} of {len(prompts)}"
    report.add_note(f"{count} prompts of {path} {why} and are skipped; {example}")
    report.left_out.extend(rejected)
    return kept


def interleave(sets: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """The first prompt of each set, then the second of each; exhausted sets are skipped."""
    rounds = itertools.zip_longest(*sets)
    return [prompt for turn in rounds for prompt in turn if prompt is not None]


def overlap(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> str | None:
    """A note if held-out prompts are also training prompts."""
    trained = {_identity(p) for p in train}
    both = [p for p in held_out if _identity(p) in trained]
    if not both:
        return None
    return (
        f"{len(both)} of {len(held_out)} held-out prompts are also training prompts, so the "
        "held-out reward does not measure generalisation on them; the first is "
        f"{both[0].where}: {both[0].text[:60]}"
    )


def _identity(prompt: Prompt) -> tuple[str, str, tuple[PromptImage, ...]]:
    """Equal for equal prompts. Includes the images: many images may share one question."""
    return prompt.text, json.dumps(prompt.messages), prompt.images


def prompt_key(prompt: Prompt) -> str:
    """Equal for prompts of equal content, wherever their rows are."""
    return hashlib.blake2b(_content(prompt), digest_size=8).hexdigest()


def _content(prompt: Prompt) -> bytes:
    images = [_name(each) for each in prompt.images]
    fields = [prompt.text, prompt.negative, prompt.messages, prompt.columns, images]
    if prompt.given:
        fields.append([_name(each) for each in prompt.given])
    if prompt.image_columns:
        fields.append({key: _name(each) for key, each in prompt.image_columns.items()})
    return json.dumps(fields).encode()


class Stream:
    """Batch i is a pure function of (seed, i), at the same cost for every i.

    Sources alternate by weight, deterministically: the k-th prompt (k = 0, 1, …) of a source with
    share p of the weights is due at (k + ½)/p, and prompts come in the order in which they are due
    (Webster's method; stride scheduling). Each source's count is therefore always its share, to
    within about one prompt. Each source is an endless sequence of shuffled passes over its prompts.
    """

    def __init__(self, parts: Sequence[WeightedPrompts], seed: int) -> None:
        self.parts = parts
        self.seed = seed
        self._weights = [[weight_of(p) for p in part.prompts] for part in parts]
        self._order = functools.lru_cache(maxsize=2 * len(parts))(self._pass)

    @property
    def prompts(self) -> list[Prompt]:
        return [prompt for part in self.parts for prompt in part.prompts]

    @functools.cached_property
    def digest(self) -> str:
        """Hash of everything that a batch depends on except the seed and the pixels: a resumed run
        with a different digest would get different batches."""
        digest = hashlib.blake2b(digest_size=8)
        for part in self.parts:
            digest.update(repr(part.weight).encode())
            for prompt in part.prompts:
                digest.update(_content(prompt))
        return digest.hexdigest()

    def batch(self, i: int, size: int) -> list[Prompt]:
        return [self._at(source, k) for source, k in self._turns(i * size, size)]

    def _turns(self, first: int, size: int) -> list[tuple[int, int]]:
        return turns([part.weight for part in self.parts], first, size)

    def other(self, seed: int) -> Stream:
        """The same prompts, drawn by another seed."""
        return Stream(self.parts, seed)

    def metrics(self) -> dict[str, float]:
        """Metrics of the last batch."""
        return {}

    def observe(self, step: int, prompts: Sequence[Prompt], spreads: Sequence[float]) -> None:
        """The standard deviations of the rewards of groups of batch `step`, for a curriculum."""

    def state(self) -> dict[str, Any]:
        """What batches depend on besides the seed and the prompts, for a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def _at(self, source: int, k: int) -> Prompt:
        prompts = self.parts[source].prompts
        turn, place = divmod(k, len(prompts))
        return prompts[self._order(source, turn)[place]]

    def _pass(self, source: int, turn: int) -> list[int]:
        """Rows of one pass over a source: each once, or by weight if rows have weights."""
        # The first source uses the seed of a single source, so that old runs resume bit for bit.
        parts = (self.seed, "data", turn, source) if source else (self.seed, "data", turn)
        start = random.Random(seed_of(*parts, "rows")).random()
        order = pass_by_weight(self._weights[source], start)
        random.Random(seed_of(*parts)).shuffle(order)
        return order


def turns(weights: Sequence[float], first: int, size: int) -> list[tuple[int, int]]:
    """(source, its k) at the positions first … first + size − 1."""
    total, half = sum(Fraction(weight) for weight in weights), Fraction(1, 2)
    strides = [total / Fraction(weight) for weight in weights]  # 1/p
    # Fewer than moment + sources/2 prompts are due before a moment: this one is early enough.
    moment = max(0, first - len(weights))
    counts = [max(0, math.ceil(moment / stride - half)) for stride in strides]
    found = []
    for position in range(sum(counts), first + size):
        due = [(k + half) * stride for k, stride in zip(counts, strides, strict=True)]
        source = due.index(min(due))
        if position >= first:
            found.append((source, counts[source]))
        counts[source] += 1
    return found


def _name(sample: PromptImage | str) -> str | int:
    """A text, the name of an image's file, or its size in bytes."""
    return sample if isinstance(sample, str) else Path(sample.path).name or len(sample.data)


def pass_by_weight(weights: Sequence[float], start: float) -> list[int]:
    """n draws from n rows, in row order: row i is drawn ⌊n·pᵢ⌋ or ⌈n·pᵢ⌉ times, with pᵢ its share
    of the weights, and n·pᵢ times on average over `start` in [0, 1) (systematic sampling, Madow
    1949). With equal weights every row is drawn once."""
    n = len(weights)
    if min(weights) == max(weights):
        return list(range(n))
    scale = n / math.fsum(weights)
    ends = [end * scale for end in itertools.accumulate(weights)]
    return [min(bisect.bisect_right(ends, start + k), n - 1) for k in range(n)]

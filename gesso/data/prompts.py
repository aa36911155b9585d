"""Which prompts there are and which of them a step uses."""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from gesso.config import ChatSettings, Data, DataSource
from gesso.data.chat import Form
from gesso.data.pictures import Unsound, faults
from gesso.data.readers import Reading, read
from gesso.data.rows import prompt_of, weight_of
from gesso.types import Picture, Prompt, UserError, seed_of


@dataclass(frozen=True)
class Part:
    """The prompts of one source, and how often they are drawn relative to the other sources."""

    prompts: Sequence[Prompt]
    weight: float = 1.0


@dataclass(frozen=True)
class Loaded:
    """What a recipe's `data` names, without the prompts that cannot be scored."""

    train: Sequence[Part]
    held_out: Sequence[Prompt]  # the sets in turn, so that the first few hold some of each
    notes: Sequence[str]  # to be told before the run
    left_out: Sequence[str] = ()  # "file:line: why" of every row that is not among them


Unfit = Callable[[Prompt], str | None]
"""Why a prompt cannot be scored, or None."""


def load(data: Data, unfit: Unfit, unfit_held_out: Unfit) -> Loaded:
    told = Told()
    form = Form.of(data)
    train = [Part(_scored(source, form, unfit, told), source.weight) for source in data.train]
    held_out, others = from_sources(data.eval, form, unfit_held_out)
    told.add(others)
    told.say(overlap([p for part in train for p in part.prompts], held_out))
    return Loaded(train, held_out, told.notes, told.left_out)


@dataclass(frozen=True)
class Told:
    """What there is to say about data, collected while it is read."""

    notes: list[str] = field(default_factory=list)  # sentences, each once
    left_out: list[str] = field(default_factory=list)  # rows, each with its reason

    def say(self, note: str | None) -> None:
        if note and note not in self.notes:
            self.notes.append(note)

    def add(self, other: Told) -> None:
        for note in other.notes:
            self.say(note)
        self.left_out.extend(other.left_out)


def from_sources(
    sources: Sequence[DataSource], form: Form, unfit: Unfit
) -> tuple[list[Prompt], Told]:
    """The prompts of several sets in turn that can be scored, and what is to tell of the others."""
    told = Told()
    return in_turn([_scored(source, form, unfit, told) for source in sources]), told


def _scored(source: DataSource, form: Form, unfit: Unfit, told: Told) -> list[Prompt]:
    reading = read(source, form)
    read_ones, note = usable(reading, source.path)
    told.say(note)
    told.left_out.extend(reading.left_out)
    return fit(read_ones, unfit, source.path, told)


def usable(reading: Reading, path: str) -> tuple[list[Prompt], str | None]:
    """The prompts of a source, and a sentence about the rows that are none."""
    if not reading.left_out:
        return reading.prompts, None
    example = f"the first is {reading.left_out[0]}"
    if not reading.prompts:
        raise UserError(f"no prompt of {path} can be used, so nothing is left; {example}")
    count, total = len(reading.left_out), len(reading.left_out) + len(reading.prompts)
    return reading.prompts, f"{count} of {total} prompts of {path} are left out; {example}"


def without(loaded: Loaded, unfit: Unfit, data: Data, why: str) -> Loaded:
    """The data without the prompts for which there is a reason; and told."""
    told = Told([*loaded.notes], [*loaded.left_out])
    train = [
        Part(fit(part.prompts, unfit, source.path, told, why), part.weight)
        for part, source in zip(loaded.train, data.train, strict=True)
    ]
    path = " and ".join(source.path for source in data.eval)
    held_out = fit(loaded.held_out, unfit, path, told, why)
    return Loaded(train, held_out, told.notes, told.left_out)


def ask(text: str, images: Sequence[str | Path | bytes], data: Data | ChatSettings) -> Prompt:
    """A person's question, formed as the rows of the data are; a picture is a file or its bytes."""
    given = [image if isinstance(image, bytes) else str(image) for image in images]
    row = {"prompt": text} | ({"images": given} if given else {})
    where = "the prompt"
    try:
        made = prompt_of(row, where, DataSource(path=where), None, Form.of(data))
    except Unsound as error:
        raise UserError(f"{where}: {error}") from error
    (fault,) = faults([made])
    if fault:
        raise UserError(f"{where}: {fault}")
    return made


def fit(
    prompts: Sequence[Prompt], unfit: Unfit, path: str, told: Told, why: str = "cannot be scored"
) -> list[Prompt]:
    """The prompts the rewards can score; about the others there is something to tell."""
    asked = [(p, unfit(p)) for p in prompts]
    kept = [p for p, reason in asked if not reason]
    if len(kept) == len(prompts):
        return kept
    refused = [f"{p.where}: {reason}: {p.text[:60]}" for p, reason in asked if reason]
    example = f"the first is {refused[0]}"
    if not kept:
        raise UserError(f"no prompt of {path} is left: all {why}; {example}")
    told.say(f"{len(refused)} of {len(prompts)} prompts of {path} {why} and are skipped; {example}")
    told.left_out.extend(refused)
    return kept


def in_turn(sets: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """One prompt of each set, then the next of each; a set that has ended is passed over."""
    rounds = itertools.zip_longest(*sets)
    return [prompt for turn in rounds for prompt in turn if prompt is not None]


def overlap(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> str | None:
    """A sentence about held-out prompts that are trained on as well."""
    trained = {_asks(p) for p in train}
    both = [p for p in held_out if _asks(p) in trained]
    if not both:
        return None
    return (
        f"{len(both)} of {len(held_out)} held-out prompts are also trained on, so the held-out "
        f"reward says less about new ones; the first is {both[0].where}: {both[0].text[:60]}"
    )


def _asks(prompt: Prompt) -> tuple[str, str, tuple[Picture, ...]]:
    """What two rows that ask the same thing share: many pictures come with one question."""
    return prompt.text, json.dumps(prompt.messages), prompt.images


class Stream:
    """Batch i is a pure function of (seed, i), at the same cost for every i.

    Sources take turns by weight, without chance: the k-th prompt (k = 0, 1, …) of a source whose
    share of the weights is p is due at (k + ½)/p, and what is due first comes first (Webster's
    method; stride scheduling). So each source's count is at every moment its share, to within a
    prompt or so. Each source is an endless row of shuffled passes over its prompts.
    """

    def __init__(self, parts: Sequence[Part], seed: int) -> None:
        self.parts = parts
        self.seed = seed
        total = sum(Fraction(part.weight) for part in parts)
        self._strides = [total / Fraction(part.weight) for part in parts]  # 1/p
        self._weights = [[weight_of(p) for p in part.prompts] for part in parts]
        self._order = functools.lru_cache(maxsize=2 * len(parts))(self._pass)

    @property
    def prompts(self) -> list[Prompt]:
        return [prompt for part in self.parts for prompt in part.prompts]

    @functools.cached_property
    def digest(self) -> str:
        """Of all that a batch depends on beside the seed, but for the pixels: a run that goes on
        with another one does not go on where it stopped."""
        found = hashlib.blake2b(digest_size=8)
        for part in self.parts:
            found.update(repr(part.weight).encode())
            for p in part.prompts:
                images = [Path(each.path).name or len(each.data) for each in p.images]
                said = [p.text, p.negative, p.messages, p.columns, images]
                found.update(json.dumps(said).encode())
        return found.hexdigest()

    def batch(self, i: int, size: int) -> list[Prompt]:
        return [self._at(source, k) for source, k in self._turns(i * size, size)]

    def _turns(self, first: int, size: int) -> list[tuple[int, int]]:
        """(source, its k) at the positions first … first + size − 1."""
        half = Fraction(1, 2)
        # Fewer than moment + sources/2 prompts are due before a moment: this one is early enough.
        moment = max(0, first - len(self.parts))
        given = [max(0, math.ceil(moment / stride - half)) for stride in self._strides]
        turns = []
        for position in range(sum(given), first + size):
            due = [(k + half) * stride for k, stride in zip(given, self._strides, strict=True)]
            source = due.index(min(due))
            if position >= first:
                turns.append((source, given[source]))
            given[source] += 1
        return turns

    def _at(self, source: int, k: int) -> Prompt:
        prompts = self.parts[source].prompts
        turn, place = divmod(k, len(prompts))
        return prompts[self._order(source, turn)[place]]

    def _pass(self, source: int, turn: int) -> list[int]:
        """Rows of one pass over a source: each once, or by weight where rows have weights."""
        # The first source is seeded as when there was but one: old runs resume to the bit.
        parts = (self.seed, "data", turn, source) if source else (self.seed, "data", turn)
        start = random.Random(seed_of(*parts, "rows")).random()
        order = pass_by_weight(self._weights[source], start)
        random.Random(seed_of(*parts)).shuffle(order)
        return order


def pass_by_weight(weights: Sequence[float], start: float) -> list[int]:
    """n draws out of n rows, in row order: row i comes ⌊n·pᵢ⌋ or ⌈n·pᵢ⌉ times, pᵢ its share of the
    weights, and n·pᵢ times on average over `start` in [0, 1) (systematic sampling, Madow 1949).
    Equal weights: every row once."""
    n = len(weights)
    if min(weights) == max(weights):
        return list(range(n))
    scale = n / math.fsum(weights)
    ends = [end * scale for end in itertools.accumulate(weights)]
    return [min(bisect.bisect_right(ends, start + k), n - 1) for k in range(n)]

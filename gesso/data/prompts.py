"""Readers for the prompt files users already have → Prompt, and which prompts a step uses."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from gesso.config import resolve_path
from gesso.types import Prompt, UserError, seed_of


def read(path: str) -> list[Prompt]:
    """`.txt`: a prompt a line. `.jsonl`: an object a line with "prompt", optionally
    "negative_prompt"; every other column goes along to the rewards."""
    file = resolve_path(path)
    if not file.is_file():
        raise UserError(f"prompt file {path}: {'a folder' if file.is_dir() else 'no such file'}")
    if file.suffix not in (".txt", ".jsonl"):
        raise UserError(
            f"prompt file {path}: expected .txt or .jsonl, found {file.suffix or 'none'}"
        )
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"prompt file {path} is not UTF-8 text: {error}") from error
    row = _text_row if file.suffix == ".txt" else _json_row
    prompts = [
        row(line, f"{Path(path).name}:{i}") for i, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise UserError(f"prompt file {path} is empty; write one prompt a line")
    return prompts


def _text_row(line: str, where: str) -> Prompt:
    return Prompt(line.strip(), where=where)


def _json_row(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise UserError(f'{where}: expected an object with a text "prompt", got {line[:60]}')
    negative = row.pop("negative_prompt", None) or ""
    if not isinstance(negative, str):
        raise UserError(f'{where}: expected text as "negative_prompt", got {negative!r}')
    return Prompt(row.pop("prompt"), negative, row, where)


def fit(
    prompts: Sequence[Prompt], unfit: Callable[[Prompt], str | None], path: str
) -> tuple[list[Prompt], str | None]:
    """The prompts the rewards can score, and a sentence about those they cannot."""
    reasons = [(p, reason) for p in prompts if (reason := unfit(p))]
    kept = [p for p in prompts if not unfit(p)]
    if not reasons:
        return kept, None
    first, reason = reasons[0]
    example = f"the first is {first.where}: {reason}: {first.text[:60]}"
    if not kept:
        raise UserError(f"no prompt of {path} can be scored, so nothing is left; {example}")
    note = f"{len(reasons)} of {len(prompts)} prompts of {path} cannot be scored and are skipped; "
    return kept, note + example


class Stream:
    """Batch i is a pure function of (seed, i): an endless row of shuffled passes over the data."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self.prompts = prompts
        self.seed = seed
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def batch(self, i: int, size: int) -> list[Prompt]:
        return [self._at(position) for position in range(i * size, (i + 1) * size)]

    def _at(self, position: int) -> Prompt:
        turn, place = divmod(position, len(self.prompts))
        return self.prompts[self._order(turn)[place]]

    def _shuffled(self, turn: int) -> list[int]:
        order = list(range(len(self.prompts)))
        random.Random(seed_of(self.seed, "data", turn)).shuffle(order)
        return order

"""Values and errors of user code, as text and lists that are safe to print and to send."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

MAX_TEXT = 10_000  # characters of a score's text
MAX_ERROR = 1_000


class InvalidScores(ValueError):
    """A return value that does not hold one score per sample."""


def clean_text(value: Any, limit: int = MAX_TEXT) -> str:
    """`value` as text that UTF-8 can encode, without NUL, cut at `limit` characters."""
    try:
        text = str(value)
    except Exception as error:  # a __str__ of user code
        text = f"(its text cannot be read: {type(error).__name__})"
    text = text.encode("utf-8", "replace").decode().replace("\0", "?")
    return text if len(text) <= limit else f"{text[:limit]}…"


def one_line(value: Any, limit: int = MAX_ERROR) -> str:
    """`clean_text` on one line, for error messages."""
    return " ".join(clean_text(value, limit).split())


def short_repr(value: Any) -> str:
    try:
        return one_line(repr(value), 80)
    except Exception:  # a __repr__ of user code
        return f"an object of type {type(value).__name__}"


def raised_message(error: BaseException) -> str:
    """The message for an error that user code raised."""
    return f"raised {type(error).__name__}: {one_line(error)}".removesuffix(": ")


def score_list(answer: Any, count: int) -> list[Any]:
    """What a reward returned for `count` samples, as a list; it may be a generator, an array or a
    tensor. Raises InvalidScores for anything else and for another number of scores. Text, bytes and
    dicts are iterable, but do not hold scores."""
    if inspect.iscoroutine(answer):
        answer.close()  # or Python warns that it was never awaited
    values = None if isinstance(answer, str | bytes | bytearray | Mapping | set) else _iter(answer)
    if values is None:
        kind = type(answer).__name__
        got = f"the {kind}" if kind == "coroutine" else f"the {kind} {short_repr(answer)}"
        got = "None" if answer is None else got
        raise InvalidScores(
            f"returned {got}; expected a list with one score for each of the {count} samples"
        )
    scores = list(itertools.islice(values, count + 1))  # a generator may never end
    if len(scores) != count:
        n = len(answer) if isinstance(answer, list | tuple) else len(scores)
        raise InvalidScores(f"returned {n} scores for {count} samples")
    return scores


def _iter(answer: Any) -> Iterator[Any] | None:
    try:
        return iter(answer)
    except TypeError:  # a number, an array of no dimension
        return None

"""Converts values and errors of user code to text and lists that are safe to print and send."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

MAX_TEXT = 10_000  # characters of a score's text
MAX_ERROR = 1_000


class InvalidScores(ValueError):
    """A return value without exactly one score per sample."""


def clean_text(value: Any, limit: int = MAX_TEXT) -> str:
    """`value` as text that UTF-8 can encode, without NUL, cut at `limit` characters."""
    try:
        text = str(value)
    except Exception as error:  # a __str__ of user code
        text = f"(str() raised {type(error).__name__})"
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


def score_list(result: Any, count: int) -> list[Any]:
    """The return value of a reward for `count` samples, as a list; it may be a generator, an array
    or a tensor. Raises InvalidScores for any other type, including text, bytes, dicts and sets,
    and for a wrong number of scores."""
    if inspect.iscoroutine(result):
        result.close()  # or Python warns that it was never awaited
    values = None if isinstance(result, str | bytes | bytearray | Mapping | set) else _iter(result)
    if values is None:
        kind = type(result).__name__
        got = f"the {kind}" if kind == "coroutine" else f"the {kind} {short_repr(result)}"
        got = "None" if result is None else got
        raise InvalidScores(
            f"returned {got}; expected a list with one score for each of the {count} samples"
        )
    scores = list(itertools.islice(values, count + 1))  # a generator may never end
    if len(scores) != count:
        n = len(result) if isinstance(result, list | tuple) else len(scores)
        raise InvalidScores(f"returned {n} scores for {count} samples")
    return scores


def _iter(result: Any) -> Iterator[Any] | None:
    try:
        return iter(result)
    except TypeError:  # a number, a zero-dimensional array
        return None

"""What user code returns and raises, as text and lists that can be counted, printed and sent."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

MAX_TEXT = 10_000  # characters of what a reward read or said
MAX_ERROR = 1_000


class Unreadable(ValueError):
    """An answer that is not one score a sample."""


def clean(value: Any, limit: int = MAX_TEXT) -> str:
    """`value` as text that UTF-8 can encode, without NUL, cut at `limit` characters."""
    try:
        text = str(value)
    except Exception as error:  # a __str__ of the user's
        text = f"(its text cannot be read: {type(error).__name__})"
    text = text.encode("utf-8", "replace").decode().replace("\0", "?")
    return text if len(text) <= limit else f"{text[:limit]}…"


def line(value: Any, limit: int = MAX_ERROR) -> str:
    """The same on one line, for messages."""
    return " ".join(clean(value, limit).split())


def shown(value: Any) -> str:
    """Its repr, short."""
    try:
        return line(repr(value), 80)
    except Exception:  # a __repr__ of the user's
        return f"an object of type {type(value).__name__}"


def raised(error: BaseException) -> str:
    """The sentence for an error of the user's code."""
    return f"raised {type(error).__name__}: {line(error)}".removesuffix(": ")


def listed(answer: Any, count: int) -> list[Any]:
    """An answer for `count` samples as a list; a generator, an array or a tensor will do. Raises
    Unreadable for anything else, and for another number of scores. A text, bytes or a dict could be
    iterated over, but not as scores."""
    if inspect.iscoroutine(answer):
        answer.close()  # or Python warns that it was never awaited
    values = None if isinstance(answer, str | bytes | bytearray | Mapping | set) else _iter(answer)
    if values is None:
        kind = type(answer).__name__
        got = f"the {kind}" if kind == "coroutine" else f"the {kind} {shown(answer)}"
        got = "None" if answer is None else got
        raise Unreadable(
            f"returned {got}; expected a list with one score for each of the {count} samples"
        )
    found = list(itertools.islice(values, count + 1))  # a generator may never end
    if len(found) != count:
        many = len(answer) if isinstance(answer, list | tuple) else len(found)
        raise Unreadable(f"returned {many} scores for {count} samples")
    return found


def _iter(answer: Any) -> Iterator[Any] | None:
    try:
        return iter(answer)
    except TypeError:  # a number, an array of no dimension
        return None

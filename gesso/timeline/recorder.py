"""The phases of this process, on the clock of `gesso.clock`.

A phase inside another one interrupts it, so that the phases of a row never overlap. Workers send
their phases with every answer, with times relative to it, since clocks differ between machines.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from gesso import clock

DRIVER, REWARDS, SAMPLER = "driver", "rewards", "sampler"
MOST = 50_000  # limit for spans that are never taken, such as a playground's
SHORTEST = 1e-4  # seconds: shorter pauses within a phase are not recorded

Item = TypeVar("Item")
Sent = Sequence[tuple[str, float, float]]
"""Phases with start and end, in seconds relative to when they are sent."""


class Span(NamedTuple):
    row: str
    phase: str
    start: float
    end: float


class _Open(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[str, bool]] = []  # name; whether inner phases count as this one
        self.since = 0.0


_spans: deque[Span] = deque(maxlen=MOST)
_open = _Open()


def worker(rank: int) -> str:
    """The name of a worker's row."""
    return f"worker {rank}"


def sampler(rank: int) -> str:
    """The name of the row of a worker that only samples."""
    return f"{SAMPLER} {rank}"


@contextmanager
def phase(name: str, whole: bool = False) -> Iterator[None]:
    """`whole`: inner phases count as this one."""
    stack = _open.stack
    if stack and stack[-1][1]:
        yield
        return
    _switch()
    stack.append((name, whole))
    try:
        yield
    finally:
        _switch()
        stack.pop()


def _switch() -> None:
    """Ends the span of the innermost phase; another begins."""
    now = clock.seconds()
    if _open.stack and now > _open.since:
        add(DRIVER, _open.stack[-1][0], _open.since, now)
    _open.since = now


def each(name: str, items: Iterable[Item]) -> Iterator[Item]:
    """Yields the items; only the time to compute them counts as this phase."""
    iterator = iter(items)
    while True:
        with phase(name):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def add(row: str, name: str, start: float, end: float) -> None:
    _spans.append(Span(row, name, start, end))


def take() -> list[Span]:
    """All finished spans since the last call."""
    taken = []
    while _spans:  # other threads may add spans
        taken.append(_spans.popleft())
    return taken


def to_send() -> Sent:
    now = clock.seconds()
    merged = joined(take(), SHORTEST)
    return [(s.phase, round(s.start - now, 6), round(s.end - now, 6)) for s in merged]


def received(row: str, sent: Sent) -> None:
    now = clock.seconds()
    for name, start, end in sent:
        add(row, name, now + start, now + end)


def joined(spans: Iterable[Span], gap: float) -> list[Span]:
    """Joins successive spans of the same phase, over pauses of up to `gap` seconds."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        if last is not None and last.phase == span.phase and span.start - last.end <= gap:
            found[-1] = last._replace(end=max(last.end, span.end))
        else:
            found.append(span)
    return found

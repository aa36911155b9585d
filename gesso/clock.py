"""The clock that loop and clusters read: real time, or the virtual time of `gesso plan`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_source: Callable[[], float] = time.perf_counter


def seconds() -> float:
    """Like `time.perf_counter`."""
    return _source()


@contextmanager
def reading(source: Callable[[], float]) -> Iterator[None]:
    """Everything in this process reads `source` meanwhile."""
    global _source
    before, _source = _source, source
    try:
        yield
    finally:
        _source = before

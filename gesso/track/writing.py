"""Checkpoints that are written while training continues."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Writing(Protocol):
    """Tensors of a checkpoint that are being written."""

    def done(self) -> bool: ...

    def finish(self) -> None:
        """Waits until they are written; raises what failed."""


class _Written:
    """They have been written."""

    def done(self) -> bool:
        return True

    def finish(self) -> None:
        """Nothing to wait for."""


WRITTEN = _Written()
Write = Callable[[Path], Writing | None]
"""Writes tensors to a folder, or begins to; None: all are written."""


class InBackground(Generic[T]):
    """Work of a thread, which does not keep the process from exiting."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as error:  # raised by `result`
            self._future.set_exception(error)

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        """Waits without raising an error."""
        concurrent.futures.wait([self._future])

    def result(self) -> T:
        return self._future.result()

    def finish(self) -> None:
        self.result()


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint that does not count yet."""

    writing: Writing
    complete: Callable[[], None]

    def done(self) -> bool:
        """Whether `finish` would not wait."""
        return self.writing.done()

    def finish(self) -> None:
        self.complete()

"""Progress of long operations, and the displays that show it.

A long operation takes a `Progress` and calls `phase` when it starts a phase and `advance` as it
proceeds. The calls are cheap: one per piece, batch or file, never one per token. They may come from
any thread.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol, TextIO


class Progress(Protocol):
    def phase(self, text: str, total: int = 0) -> None:
        """Starts a phase of `total` units; 0: unknown."""

    def advance(self, done: int = 1) -> None:
        """`done` more units of the phase are done."""

    def note(self, text: str) -> None:
        """A message that stays visible."""


class Watcher(Progress, Protocol):
    """Follows a training run."""

    def start(self, step: int, total: int) -> None:
        """The run starts, or resumes after `step` of `total` steps."""

    def row(self, row: Mapping[str, Any]) -> None:
        """A row of metrics; it and the samples of its evaluation are already in the run folder."""


class Display(Watcher, Protocol):
    """The output of a command. A context manager, so that the terminal is restored."""

    def result(self, text: str, data: Mapping[str, Any]) -> None:
        """The result of the command: text for users, data for programs."""

    def __enter__(self) -> Display: ...
    def __exit__(self, *_: object) -> None: ...


class Silent:
    """Shows only the result."""

    def start(self, step: int, total: int) -> None: ...
    def phase(self, text: str, total: int = 0) -> None: ...
    def advance(self, done: int = 1) -> None: ...
    def row(self, row: Mapping[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...

    def result(self, text: str, data: Mapping[str, Any]) -> None:
        print(text, flush=True)

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None: ...


SILENT = Silent()


class Clock:
    """Progress of a phase, and its remaining time at the current rate."""

    def __init__(self, text: str, total: int = 0) -> None:
        self.text = text
        self.total = total
        self.done = 0
        self.since = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    @property
    def left(self) -> float | None:
        """Estimated remaining seconds; None before the first `advance` and at the end."""
        if not 0 < self.done < self.total:
            return None
        return self.seconds / self.done * (self.total - self.done)


class Json:
    """Events as one JSON object per line: phase, progress (at most one per second), row, note,
    result."""

    def __init__(self, out: TextIO | None = None, every: float = 1.0) -> None:
        self.out = out if out is not None else sys.stdout
        self.every = every
        self.doing = Clock("")
        self._reported = 0.0  # time of the last progress event
        self._lock = threading.RLock()  # reentrant: Ctrl-C may write a note at any point

    def __enter__(self) -> Json:
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self, step: int, total: int) -> None:
        self._event("start", {"step": step, "total": total})

    def phase(self, text: str, total: int = 0) -> None:
        self.doing, self._reported = Clock(text, total), time.monotonic()
        self._event("phase", {"text": text, "total": total})

    def advance(self, done: int = 1) -> None:
        with self._lock:
            self.doing.done += done
            due = time.monotonic() - self._reported >= self.every
            if due:
                self._reported = time.monotonic()
        if due:
            doing = self.doing
            known = {"text": doing.text, "done": doing.done, "total": doing.total}
            self._event("progress", known | {"left": doing.left})

    def row(self, row: Mapping[str, Any]) -> None:
        self._event("row", row)

    def note(self, text: str) -> None:
        self._event("note", {"text": text})

    def result(self, text: str, data: Mapping[str, Any]) -> None:
        self._event("result", data)

    def error(self, text: str, code: int) -> None:
        """The error that ends the command, and its exit status."""
        self._event("error", {"text": text, "code": code})

    def _event(self, kind: str, data: Mapping[str, Any]) -> None:
        line = json.dumps(_plain({"event": kind, **data}), allow_nan=False)
        with self._lock:
            self.out.write(line + "\n")
            self.out.flush()


def _plain(value: Any) -> Any:
    """JSON has no NaN: non-finite values become null."""
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

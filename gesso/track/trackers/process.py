"""Trackers on the side of the run: notified of new rows, without waiting for them.

Each tracker is a process with a thread here. The thread sends commands one at a time and waits for
the response; the run only queues them. A tracker that raises, dies or does not respond for
`patience` seconds is reported once and disabled; the run continues.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gesso import imports
from gesso.config import Tracker as Settings
from gesso.track.progress import Display
from gesso.track.trackers.base import file_name

MAX_REASON = 300  # characters of an error that a note includes
EXIT_TIME = 5.0  # seconds a process may take to exit after it reported "done"


class _TrackerLost(Exception):
    """The tracker cannot be used any more; the message is the reason."""


class _TrackerLate(_TrackerLost):
    """The tracker hangs."""


class Tracked:
    """One tracker. `note` is called from its thread."""

    def __init__(
        self,
        name: str,
        reference: str,
        run: Path,
        config: Mapping[str, Any],
        settings: Settings,
        note: Callable[[str], None],
    ) -> None:
        self.name = name
        self.order = {
            "name": name,
            "reference": reference,
            "run": str(run),
            "config": config,
            "settings": settings.model_dump(),
        }
        self.log = run / "trackers" / f"{file_name(name)}.log"
        self.patience = settings.patience
        self.note = note
        self._commands: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._waiting = threading.Event()  # set: a "news" command is already queued
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self.news()

    def news(self) -> None:
        """The run folder has a new row."""
        if not self._waiting.is_set():
            self._waiting.set()
            self._commands.put("news")

    def finish(self, ok: bool) -> None:
        """Requests the tracker to finish; `join` waits for it."""
        self._deadline = time.monotonic() + self.patience
        self._commands.put("finish" if ok else "fail")

    def join(self) -> None:
        """Waits until the tracker has finished or its patience is exceeded."""
        if self._thread.is_alive():
            self._thread.join(max(0.0, self._deadline - time.monotonic()) + 2 * EXIT_TIME)

    def _serve(self) -> None:
        try:
            self.log.parent.mkdir(exist_ok=True)
            with self.log.open("ab") as log:
                process = subprocess.Popen(
                    imports.command("gesso.track.trackers.worker"),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C goes to the run, which stops the tracker
                )
        except OSError as error:
            return self._give_up(str(error))
        try:
            self._communicate(_Pipe(process))
            _end(process)
        except _TrackerLost as error:
            _end(process, 0.0 if isinstance(error, _TrackerLate) else EXIT_TIME)
            self._give_up(str(error))

    def _communicate(self, pipe: _Pipe) -> None:
        pipe.send(self.order)
        self.note(f"{self.name}: {self._receive(pipe, 'where')['where']}")
        while True:
            command = self._commands.get()
            if command == "news":
                self._waiting.clear()
            pipe.send(command)
            if "done" in self._receive(pipe, "idle", "done"):
                return

    def _receive(self, pipe: _Pipe, *kinds: str) -> dict[str, Any]:
        """The first response of one of these kinds; others only show that it is alive."""
        while True:
            limit = min(self.patience, self._deadline - time.monotonic())
            answer = pipe.receive(limit)
            if answer is None and limit < self.patience:
                raise _TrackerLate(f"it did not finish within {self.patience:g} s after the run")
            if answer is None:
                raise _TrackerLate(f"it did not respond within {self.patience:g} s")
            if "error" in answer:
                raise _TrackerLost(answer["error"])
            if any(kind in answer for kind in kinds):
                return answer

    def _give_up(self, reason: str) -> None:
        summary = " ".join(reason.split())[:MAX_REASON].rstrip(". ")
        self.note(
            f"tracker {self.name} is disabled: {summary}; the run continues, and a resumed run "
            f"logs the missing rows; see {self.log}"
        )


class _Pipe:
    """Lines of JSON to and from a process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process, self.stdin, self.stdout = process, process.stdin, process.stdout
        self._read = b""

    def send(self, message: Any) -> None:
        try:
            self.stdin.write(json.dumps(message).encode() + b"\n")
            self.stdin.flush()
        except OSError:
            raise _TrackerLost("its process died") from None

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """None on timeout."""
        until = time.monotonic() + seconds
        while b"\n" not in self._read:
            left = max(0.0, until - time.monotonic())
            if not select.select([self.stdout], [], [], left)[0]:
                return None
            part = os.read(self.stdout.fileno(), 65536)
            if not part:
                raise _TrackerLost("its process died")
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)


def _end(process: subprocess.Popen[bytes], seconds: float = EXIT_TIME) -> None:
    """Waits for the process to exit; after the timeout kills it and its subprocesses."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Watchers:
    """The display of a run and its trackers, as one watcher."""

    def __init__(self, display: Display, trackers: Sequence[Tracked]) -> None:
        self.display = display
        self.trackers = trackers
        self.phase, self.advance, self.note = display.phase, display.advance, display.note

    def start(self, step: int, total: int) -> None:
        self.display.start(step, total)
        for tracker in self.trackers:
            tracker.start()

    def row(self, row: Mapping[str, Any]) -> None:
        self.display.row(row)
        for tracker in self.trackers:
            tracker.news()

    def finish(self, ok: bool) -> None:
        """Waits for the trackers, each at most for its patience."""
        if self.trackers:
            self.phase(f"finishing {', '.join(t.name for t in self.trackers)}", len(self.trackers))
        for tracker in self.trackers:
            tracker.finish(ok)
        for tracker in self.trackers:
            tracker.join()
            self.advance()

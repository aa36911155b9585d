"""Trackers as the run sees them: notified of new rows, never waited for.

Each is a process with a thread here. The thread passes commands on one at a time and waits for the
answer; the run only queues them. A tracker that raises, dies or gives no answer for `patience`
seconds is reported once and switched off; the run goes on.
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

MAX_REASON = 300  # characters of an error that a note repeats
LEAVING = 5.0  # seconds a process may take to end after it has said that it is done


class _TrackerLost(Exception):
    """The tracker cannot be used any more; the reason in a few words."""


class _TrackerLate(_TrackerLost):
    """It hangs."""


class Tracked:
    """One tracker. `tell` is called from its thread."""

    def __init__(
        self,
        name: str,
        reference: str,
        run: Path,
        config: Mapping[str, Any],
        settings: Settings,
        tell: Callable[[str], None],
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
        self.tell = tell
        self._commands: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._waiting = threading.Event()  # set: it will look for news anyway
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
        """Let it come to an end; `join` waits for that."""
        self._deadline = time.monotonic() + self.patience
        self._commands.put("finish" if ok else "fail")

    def join(self) -> None:
        """Until it has finished or its time is over."""
        if self._thread.is_alive():
            self._thread.join(max(0.0, self._deadline - time.monotonic()) + 2 * LEAVING)

    def _serve(self) -> None:
        try:
            self.log.parent.mkdir(exist_ok=True)
            with self.log.open("ab") as log:
                process = subprocess.Popen(
                    imports.command("gesso.track.trackers.worker"),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the run, which tells it
                )
        except OSError as error:
            return self._give_up(str(error))
        try:
            self._converse(_Pipe(process))
            _end(process)
        except _TrackerLost as error:
            _end(process, 0.0 if isinstance(error, _TrackerLate) else LEAVING)
            self._give_up(str(error))

    def _converse(self, pipe: _Pipe) -> None:
        pipe.send(self.order)
        self.tell(f"{self.name}: {self._hear(pipe, 'where')['where']}")
        while True:
            command = self._commands.get()
            if command == "news":
                self._waiting.clear()
            pipe.send(command)
            if "done" in self._hear(pipe, "idle", "done"):
                return

    def _hear(self, pipe: _Pipe, *wanted: str) -> dict[str, Any]:
        """The first answer of those kinds; others show that it is alive."""
        while True:
            limit = min(self.patience, self._deadline - time.monotonic())
            answer = pipe.receive(limit)
            if answer is None and limit < self.patience:
                raise _TrackerLate(f"it was not done {self.patience:g} s after the run")
            if answer is None:
                raise _TrackerLate(f"it gave no answer in {self.patience:g} s")
            if "error" in answer:
                raise _TrackerLost(answer["error"])
            if any(kind in answer for kind in wanted):
                return answer

    def _give_up(self, reason: str) -> None:
        summary = " ".join(reason.split())[:MAX_REASON].rstrip(". ")
        self.tell(
            f"tracker {self.name} is switched off: {summary}; the run goes on, and a resumed run "
            f"gives it what it missed; more in {self.log}"
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
        """None: not in time."""
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


def _end(process: subprocess.Popen[bytes], seconds: float = LEAVING) -> None:
    """It ends by itself; what hangs is killed, with whatever it has started."""
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
        """Wait for the trackers, each until its patience is over."""
        if self.trackers:
            self.phase(f"finishing {', '.join(t.name for t in self.trackers)}", len(self.trackers))
        for tracker in self.trackers:
            tracker.finish(ok)
        for tracker in self.trackers:
            tracker.join()
            self.advance()

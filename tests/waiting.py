"""Waiting for what a test needs, never for the clock: a busy machine is slow, not broken."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

LIMIT = 900.0  # seconds; against a hang only: nothing that works takes so long
SHOWN = 4000  # characters of the end of a process's output

T = TypeVar("T")


def until(
    true: Callable[[], T | None],
    ended: Callable[[], int | None] = lambda: None,
    output: Callable[[], str] = lambda: "",
    limit: float = LIMIT,
    every: float = 0.01,
) -> T:
    """The first true value of `true()`.

    `ended` gives the exit status of the process that is waited for, None while it runs. Once it has
    ended, this fails at once and shows the end of its `output`.
    """
    deadline = time.monotonic() + limit
    while True:
        status = ended()  # before `true`: a process may end right after it has done its part
        if found := true():
            return found
        if status is not None:
            raise AssertionError(f"it ended with exit status {status}: {output()[-SHOWN:]}")
        if time.monotonic() > deadline:
            raise AssertionError(f"not so far after {limit:g} s: {output()[-SHOWN:]}")
        time.sleep(every)


class Started:
    """A command as a process of its own, until `end`. What it prints goes to a file: a pipe that
    nobody reads would block it."""

    def __init__(
        self,
        command: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        start_new_session: bool = False,
    ) -> None:
        self.started_in(
            lambda log: subprocess.Popen(
                [str(part) for part in command],
                stdout=log,
                stderr=log,
                env=env,
                cwd=cwd,
                start_new_session=start_new_session,
            )
        )

    def started_in(self, start: Callable[[Any], Any]) -> None:
        """With the process that prints to this file."""
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115 it closes in `end`
        self.process = start(self._log)

    def output(self) -> str:
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def until(self, true: Callable[[], T | None], limit: float = LIMIT) -> T:
        """The first true value of `true()`; fails at once if the process ends before."""
        try:
            return until(true, self.process.poll, self.output, limit)
        except BaseException:
            self.end()
            raise

    def printed(self, pattern: str) -> re.Match[str]:
        """Once a whole line of its output matches."""
        line = re.compile(f"^.*{pattern}.*\n", re.MULTILINE)
        return self.until(lambda: line.search(self.output()))

    def end(self, seconds: float = 60.0) -> int:
        """Its exit status. One that does not react to SIGTERM, as while it starts, is killed."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._log.close()
        return self.process.wait()

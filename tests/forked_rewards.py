"""Reward processes that are forked from a process which has imported everything: to start one takes
a third of the time of a small run. Tests of how they start and end (REAL) do it as users do."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from typing import Any

from gesso import imports
from gesso.rewards.transport import worker, workers
from gesso.rewards.transport.workers import WorkerScorer
from tests import forked

REAL = ("environments", "faults", "groupwise", "http", "rewards", "robustness", "user_code")
_started = WorkerScorer._start


def use() -> None:
    """From now on, in this process."""
    WorkerScorer._start = _start  # type: ignore[method-assign]


async def _start(self: WorkerScorer) -> Any:
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if self.python or test.startswith(tuple(f"tests/rewards/test_{name}.py" for name in REAL)):
        return await _started(self)
    process = await Forked.start(self.reference, json.dumps(self.options), self.style)
    self._alive.add(process)  # type: ignore[arg-type]
    return process


class Forked:
    """What a pool of reward processes uses of `asyncio.subprocess.Process`."""

    process: ForkServerProcess
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    reading: asyncio.ReadTransport

    @classmethod
    async def start(cls, *arguments: str) -> Forked:
        self, loop = cls(), asyncio.get_running_loop()
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        setting = imports.import_path(), os.getcwd(), os.environ | workers._ONE_THREAD
        self.process = forked.started(
            _run, arguments, *setting, _Descriptors(theirs_in, theirs_out, 2)
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdout = asyncio.StreamReader(limit=workers._LINE_LIMIT)
        self.reading, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self.stdout), os.fdopen(ours_out, "rb", 0)
        )
        writing, flow = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(ours_in, "wb", 0)
        )
        self.stdin = asyncio.StreamWriter(writing, flow, None, loop)
        return self

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    async def wait(self) -> int:
        while self.process.exitcode is None:
            await asyncio.sleep(0.002)
        self.stdin.close()
        self.reading.close()
        return self.process.exitcode


class _Descriptors:
    """Descriptors of files, which the other process gets as 0, 1 and 2."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def __getstate__(self) -> list[Any]:
        return [DupFd(number) for number in self.numbers]

    def __setstate__(self, duplicates: list[Any]) -> None:
        for standard, duplicate in enumerate(duplicates):
            number = duplicate.detach()
            os.dup2(number, standard)
            os.close(number)


def _run(
    arguments: tuple[str, ...], path: list[str], folder: str, environment: dict[str, str], _: Any
) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:], sys.argv[:] = path, ["reward", *arguments]
    worker.main()

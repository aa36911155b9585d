"""A pool of reward processes, driven from an event loop.

A worker that dies is replaced and its samples are retried up to two times, one at a time, so that
only the sample that kills it fails, as `Score.error`; a group is retried as a whole. A crash in a
reward never ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from gesso import imports
from gesso.rewards.transport import wire
from gesso.rewards.transport.batches import score_batches
from gesso.types import Sample, Score

_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
_LINE_LIMIT = 2**24


class _WorkerLost(Exception):
    """A worker did not return scores."""


class _WorkerTimeout(_WorkerLost):
    """A worker did not return scores in time."""


class WorkerScorer:
    def __init__(
        self,
        reference: str,
        options: Mapping[str, Any],
        count: int,
        batch: int = 4,
        timeout: float = 300.0,
        style: str = "gesso",
        random: bool = False,
        groupwise: bool = False,
        python: str | None = None,
    ) -> None:
        self.reference = reference
        self.options = dict(options)
        self.style = style
        self.batch = batch
        self.timeout = timeout
        self.processes = count
        self.hits = 0
        self.random = random
        self.groupwise = groupwise
        self.python = python  # of another environment
        self.restarts = 0
        self._idle: asyncio.Queue[asyncio.subprocess.Process | None] | None = None
        self._alive: set[asyncio.subprocess.Process] = set()

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        size = len(samples) if self.groupwise else self.batch
        return await score_batches(self._score, samples, size)

    async def _score(self, samples: Sequence[Sample]) -> list[Score]:
        if self._idle is None:
            self._idle = asyncio.Queue()
            for _ in range(self.processes):
                self._idle.put_nowait(None)  # started when first needed
        try:
            return await self._try(samples)
        except _WorkerTimeout:
            return await self._retry(samples, 1)
        except _WorkerLost:
            if self.groupwise:
                return await self._retry(samples, 2)
            return [score for sample in samples for score in await self._retry([sample], 2)]

    async def _retry(self, samples: Sequence[Sample], attempts: int) -> list[Score]:
        for _ in range(attempts):
            try:
                return await self._try(samples)
            except _WorkerLost as error:
                reason = f"{error}, {attempts + 1} times"
        return [Score.failed(reason)] * len(samples)

    async def _try(self, samples: Sequence[Sample]) -> list[Score]:
        assert self._idle is not None
        frame = wire.pack_samples(samples)
        process = await self._idle.get()
        try:
            if process is None or process.returncode is not None:
                process = await self._start()
            try:
                scores = await asyncio.wait_for(self._exchange(process, frame), self.timeout)
                if len(scores) != len(samples):
                    raise ValueError(f"{len(scores)} scores for {len(samples)} samples")
                return scores
            except asyncio.TimeoutError:
                lost: _WorkerLost = _WorkerTimeout(f"returned no scores within {self.timeout:g} s")
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                lost = _WorkerLost(f"the worker died ({await self._status(process) or error})")
            except asyncio.CancelledError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()  # else the next samples would receive these scores
                process = None
                raise
            await self._end(process)
            self.restarts += 1
            raise lost
        finally:
            self._idle.put_nowait(process)

    async def _status(self, process: asyncio.subprocess.Process) -> str:
        """How the process ended, for an error; "" while it is running."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), 1.0)
        code = process.returncode
        if code is None:
            return ""
        return f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    async def _start(self) -> asyncio.subprocess.Process:
        arguments = self.reference, json.dumps(self.options), self.style
        process = await asyncio.create_subprocess_exec(
            *imports.command("gesso.rewards.transport.worker", *arguments, python=self.python),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | _ONE_THREAD,
            limit=_LINE_LIMIT,
            start_new_session=True,  # Ctrl-C reaches only the loop, which then stops the workers
        )
        self._alive.add(process)
        return process

    async def _exchange(self, process: asyncio.subprocess.Process, frame: bytes) -> list[Score]:
        assert process.stdin and process.stdout
        process.stdin.write(frame)
        await process.stdin.drain()
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            raise asyncio.IncompleteReadError(line, None)
        return wire.read_scores(line)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        self._alive.discard(process)

    async def close(self) -> None:
        for process in list(self._alive):
            await self._end(process)

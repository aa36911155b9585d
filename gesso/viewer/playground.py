"""The playground: its requests, its single job, and the protocol of its backend.

The server takes a `PlaygroundBackend`; `studio.py` implements the one of `gesso view`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from gesso.config import Strict
from gesso.track.progress import Progress
from gesso.types import StopRun, UserError


class PlaygroundRequest(Strict):
    run: str
    prompt: str = Field(min_length=1, max_length=20_000)
    seed: int = Field(0, ge=0, lt=2**31)
    n: int = Field(1, ge=1, le=16)
    images: list[str] = Field([], max_length=16)  # base64, for models that take input images
    answer: str = Field("", max_length=2_000)  # the expected answer, for rewards that use one
    score: bool = True  # whether to compute the run's rewards


class PlaygroundBackend(Protocol):
    def generate(self, run: Path, request: PlaygroundRequest, progress: Progress) -> dict[str, Any]:
        """{"base": cells, "trained": cells, "step": …}; a cell has `image` (a data URI) or
        `response`, and `reward`, `parts`, `text`, `error` like samples."""

    def close(self) -> None:
        """Called when the server stops: releases the model and the reward processes."""


@dataclass
class PlaygroundJob:
    """The current or last job of the playground; the `Progress` of its backend."""

    state: str = "idle"  # idle, busy, done, failed
    doing: str = ""
    share: float | None = None
    result: dict[str, Any] = field(default_factory=dict)
    _done: int = 0
    _total: int = 0

    def phase(self, text: str, total: int = 0) -> None:
        self.doing, self._done, self._total = text, 0, total
        self.share = 0.0 if total else None

    def advance(self, done: int = 1) -> None:
        self._done += done
        self.share = min(1.0, self._done / self._total) if self._total else None

    def note(self, text: str) -> None:
        self.result.setdefault("notes", []).append(text)

    def snapshot(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "doing": self.doing,
            "share": self.share,
            "result": self.result if self.state in ("done", "failed") else {},
        }


class Playground:
    """Runs one job at a time in a thread, so that only one model is in memory."""

    def __init__(self, backend: PlaygroundBackend) -> None:
        self.backend = backend
        self.job = PlaygroundJob()
        self._worker = ThreadPoolExecutor(1)

    def start(self, run: Path, request: PlaygroundRequest) -> dict[str, Any]:
        if self.job.state == "busy":
            raise UserError("the playground is busy with another request; wait for it to finish")
        self.job = PlaygroundJob("busy", "starting")
        self._worker.submit(self._work, self.job, run, request)
        return self.job.snapshot()

    def _work(self, job: PlaygroundJob, run: Path, request: PlaygroundRequest) -> None:
        try:
            job.result |= self.backend.generate(run, request, job)
            job.state = "done"
        except Exception as error:  # shown on the page; the server continues
            plain = isinstance(error, UserError | StopRun)
            message = str(error) if plain else f"{type(error).__name__}: {error}"
            job.result = {"error": message}
            job.state = "failed"

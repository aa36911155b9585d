"""The playground: its requests, its one job at a time, and the protocol of what draws.

The server is given a `PlaygroundBackend`; `studio.py` has the one of `gesso view`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from gesso.config import Strict
from gesso.track.progress import Progress
from gesso.types import UserError


class PlaygroundRequest(Strict):
    run: str
    prompt: str = Field(min_length=1, max_length=20_000)
    seed: int = Field(0, ge=0, lt=2**31)
    n: int = Field(1, ge=1, le=16)
    image: str = ""  # base64 of a picture to look at, for a model that sees
    answer: str = Field("", max_length=2_000)  # the wanted one, for rewards that look for it
    score: bool = True  # by the run's rewards, too


class PlaygroundBackend(Protocol):
    def draw(self, run: Path, request: PlaygroundRequest, progress: Progress) -> dict[str, Any]:
        """{"base": cells, "trained": cells, "step": …}; a cell has `image` (a data URI) or
        `response`, and `reward`, `parts`, `text`, `error` as samples have."""

    def close(self) -> None:
        """The server ends: release the model and the reward processes."""


@dataclass
class PlaygroundJob:
    """What the playground is doing, or did last; the `Progress` of its backend."""

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
    """Runs one job at a time in its own thread, so that a model is in memory once."""

    def __init__(self, backend: PlaygroundBackend) -> None:
        self.backend = backend
        self.job = PlaygroundJob()
        self._worker = ThreadPoolExecutor(1)

    def start(self, run: Path, request: PlaygroundRequest) -> dict[str, Any]:
        if self.job.state == "busy":
            raise UserError("the playground is still drawing; wait for it to end")
        self.job = PlaygroundJob("busy", "starting")
        self._worker.submit(self._work, self.job, run, request)
        return self.job.snapshot()

    def _work(self, job: PlaygroundJob, run: Path, request: PlaygroundRequest) -> None:
        try:
            job.result |= self.backend.draw(run, request, job)
            job.state = "done"
        except Exception as error:  # shown in the page; the server goes on
            plain = isinstance(error, UserError)
            message = str(error) if plain else f"{type(error).__name__}: {error}"
            job.result = {"error": message}
            job.state = "failed"

"""`gesso serve-reward`: serves a reward over HTTP to any number of runs.

/score and /get_reward as in protocol.py; /score also accepts multipart (a part `samples`, JSON
without images, a part `image` for each, in order, and `group`). /health returns the name and
counters.

Samples of all clients wait in one queue and are scored in batches. Limits: bytes per request,
seconds for it to arrive, samples in the queue. With a token, every request must send it; without
one, the server binds only to loopback.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gesso import serving
from gesso.config.parsing import parse
from gesso.rewards.base import Scorer
from gesso.rewards.transport import protocol
from gesso.rewards.wrapper import ScorerWrapper
from gesso.types import Sample, Score, UserError

if TYPE_CHECKING:
    from fastapi import FastAPI

MAX_QUEUED = 4_096  # samples; beyond that, requests get 503
BATCH_WAIT = 0.005  # seconds for a batch to fill up
UPLOAD_TIMEOUT = 60.0  # seconds for a request to arrive


class QueueFull(Exception):
    """The queue cannot take these samples."""


@dataclass(frozen=True)
class Unit:
    """Samples that are scored in one batch: a single one, or a group."""

    samples: Sequence[Sample]
    scores: asyncio.Future[list[Score]]


class BatchingScorer(ScorerWrapper):
    """Scores samples of all clients in batches of at most `size`, `lanes` batches concurrently.
    While all lanes are busy, the next batch fills up. A group is always one batch."""

    def __init__(self, inner: Scorer, size: int, lanes: int, limit: int = MAX_QUEUED) -> None:
        super().__init__(inner)
        self.size = size
        self.limit = limit
        self._lanes = asyncio.Semaphore(lanes)
        self._waiting: deque[Unit] = deque()
        self._arrived = asyncio.Event()
        self._feeding: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        return sum(len(unit.samples) for unit in self._waiting)

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        if self.waiting + len(samples) > self.limit:
            raise QueueFull(f"{self.waiting} samples are queued, the limit is {self.limit}")
        if self._feeding is None:
            self._feeding = asyncio.ensure_future(self._feed())
        loop = asyncio.get_running_loop()
        cut = [samples] if self.groupwise else [[sample] for sample in samples]
        units = [Unit(each, loop.create_future()) for each in cut]
        self._waiting.extend(units)
        self._arrived.set()
        scored = await asyncio.gather(*(unit.scores for unit in units))
        return [score for scores in scored for score in scores]

    async def _feed(self) -> None:
        while True:
            await self._lanes.acquire()
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            size = 1 if self.groupwise else self.size
            if len(self._waiting) < size:
                await asyncio.sleep(BATCH_WAIT)
            batch = [self._waiting.popleft() for _ in range(min(size, len(self._waiting)))]
            task = asyncio.ensure_future(self._score(batch))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _score(self, batch: Sequence[Unit]) -> None:
        samples = [sample for unit in batch for sample in unit.samples]
        try:
            scores = await self.inner.score(samples)
        except Exception as error:  # a client is waiting for each sample
            scores = [Score.failed(f"raised {type(error).__name__}: {error}")] * len(samples)
        finally:
            self._lanes.release()
        rest = iter(scores)
        for unit in batch:
            part = list(itertools.islice(rest, len(unit.samples)))
            if not unit.scores.done():
                unit.scores.set_result(part)

    async def close(self) -> None:
        if self._feeding is not None:
            self._feeding.cancel()
        for task in list(self._running):
            task.cancel()
        await super().close()


@dataclass
class RequestCounts:
    requests: int = 0
    scored: int = 0
    failed: int = 0


def app(name: str, scorer: Scorer, token: str | None, max_bytes: int) -> FastAPI:
    try:
        from fastapi import FastAPI, HTTPException, Request
        from fastapi.responses import JSONResponse
    except ImportError as error:
        raise UserError('serving a reward requires FastAPI: pip install "gesso[serve]"') from error

    application = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    counts = RequestCounts()
    expected = f"Bearer {token}".encode()

    async def read(
        request: Request, parser: Callable[[bytes, Request], Awaitable[protocol.Received]]
    ) -> Sequence[Sample]:
        authorization = request.headers.get("authorization", "").encode()
        if token is not None and not hmac.compare_digest(authorization, expected):
            raise HTTPException(401, "a bearer token is required", {"WWW-Authenticate": "Bearer"})
        try:
            body = await asyncio.wait_for(receive(request), UPLOAD_TIMEOUT)
            received = await parser(body, request)
            _check_group(name, scorer.groupwise, received.group)
            return received.samples
        except asyncio.TimeoutError:
            raise HTTPException(408, f"a request must arrive within {UPLOAD_TIMEOUT:g} s") from None
        except UserError as error:
            raise HTTPException(422, str(error)) from None

    async def receive(request: Request) -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise HTTPException(413, f"a request may have at most {max_bytes:,} bytes")
        return bytes(body)

    async def score(samples: Sequence[Sample]) -> list[Score]:
        counts.requests += 1
        try:
            scores = await scorer.score(samples)
        except QueueFull as error:
            raise HTTPException(503, str(error), {"Retry-After": "1"}) from None
        good = sum(s.error is None for s in scores)
        counts.scored += good
        counts.failed += len(scores) - good
        return scores

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"reward": name, **vars(counts)})

    async def score_samples(request: Request) -> JSONResponse:
        multipart = request.headers.get("content-type", "").startswith("multipart/form-data")
        samples = await read(request, _multipart if multipart else _json)
        return JSONResponse(protocol.pack_scores(await score(samples), scorer.random))

    async def get_reward(request: Request) -> JSONResponse:
        scores = await score(await read(request, _openrlhf))
        errors = [s.error or "the reward does not apply" for s in scores if not s.ok]
        if errors:  # the protocol cannot express a failure
            detail = f"{len(errors)} of {len(scores)} samples failed; the last: {errors[-1]}"
            raise HTTPException(422, detail)
        return JSONResponse({"rewards": [s.value for s in scores]})

    application.add_route("/health", health, methods=["GET"])
    application.add_route("/score", score_samples, methods=["POST"])
    application.add_route("/get_reward", get_reward, methods=["POST"])
    return application


def _check_group(name: str, groupwise: bool, group: bool) -> None:
    """Raises if samples that are not one whole group were sent to a groupwise reward, or the
    reverse."""
    if groupwise and not group:
        raise UserError(
            f'the reward "{name}" compares the samples of a prompt and expects "group": true, got '
            "single samples; set reward.remote.groupwise = true in the recipe"
        )
    if group and not groupwise:
        raise UserError(
            f'the reward "{name}" scores samples one by one, got "group": true; remove '
            "reward.remote.groupwise from the recipe"
        )


async def _json(body: bytes, request: Any) -> protocol.Received:
    return await protocol.offload(len(body), protocol.read_score_request, body)


async def _openrlhf(body: bytes, request: Any) -> protocol.Received:
    return protocol.Received(await protocol.offload(len(body), protocol.read_get_reward, body))


async def _multipart(body: bytes, request: Any) -> protocol.Received:
    from starlette.formparsers import MultiPartException, MultiPartParser

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    try:
        form = await MultiPartParser(request.headers, stream(), max_part_size=len(body) + 1).parse()
    except MultiPartException as error:
        raise UserError(f"request: not multipart ({error})") from None
    text = form.get("samples")
    if not isinstance(text, str):
        raise UserError('request: expected a part "samples" with the samples as JSON')
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f'request: "samples" is not JSON ({error})') from None
    group = form.get("group", "false")
    if group not in ("true", "false"):
        raise UserError(
            f'request: expected "true" or "false" in the part "group", got {group!r:.60}'
        )
    rows = parse(protocol.ScoreRequest, {"samples": data}, "request").samples
    parts = [file for file in form.getlist("image") if not isinstance(file, str)]
    if parts and len(parts) != len(rows):
        raise UserError(f'request: {len(parts)} parts "image" for {len(rows)} samples')
    files = [protocol.sample_files(row) for row in rows]
    if parts and any(files):
        raise UserError('request: images both in parts "image" and in "samples"; send them once')
    files = [[await file.read()] for file in parts] or files
    protocol.check_pixels(file for each in files for file in each)
    samples = [
        await protocol.offload(len(body), protocol.sample_of, row, each)
        for row, each in zip(rows, files, strict=True)
    ]
    return protocol.Received(samples, group == "true")


def serve(
    name: str, scorer: Scorer, host: str, port: int, token: str | None, max_bytes: int
) -> None:
    """Serves until SIGINT or SIGTERM, then finishes requests in flight and stops the workers."""
    serving.check_host(host, token)
    application = app(name, scorer, token, max_bytes)

    def started(address: str) -> None:
        print(f"serving {name} at {address}", flush=True)

    serving.serve(application, host, port, started, scorer.close)

"""`gesso serve-reward`: a reward behind HTTP, for any number of runs.

/score and /get_reward as in protocol.py; /score takes multipart too (a part `samples`, JSON without
pictures, and a part `image` for each, in order). /health says who it is and how much it did.

Samples of all callers wait in one queue and are scored in batches. Limits: bytes of a request,
seconds for it to arrive, samples in the queue. With a token, everybody must send it; without one,
only loopback is served.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gesso import serving
from gesso.config.parsing import parse
from gesso.rewards.base import Scorer
from gesso.rewards.transport import protocol
from gesso.types import Sample, Score, UserError

if TYPE_CHECKING:
    from fastapi import FastAPI

QUEUE = 4_096  # samples that may wait; more are answered 503
GATHER = 0.005  # seconds a batch waits for company
UPLOAD = 60.0  # seconds for a request to arrive


class Busy(Exception):
    """More samples are waiting than the queue holds."""


class Batcher:
    """In front of another scorer: samples of all callers, in batches of at most `size`, `lanes`
    batches at a time. While all lanes are busy the next batch fills up."""

    def __init__(self, inner: Scorer, size: int, lanes: int, limit: int = QUEUE) -> None:
        self.inner = inner
        self.size = size
        self.limit = limit
        self._lanes = asyncio.Semaphore(lanes)
        self._waiting: deque[tuple[Sample, asyncio.Future[Score]]] = deque()
        self._arrived = asyncio.Event()
        self._feeding: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()

    @property
    def processes(self) -> int:
        return self.inner.processes

    @property
    def hits(self) -> int:
        return self.inner.hits

    @property
    def random(self) -> bool:
        return self.inner.random

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        if len(self._waiting) + len(samples) > self.limit:
            raise Busy(f"{len(self._waiting)} samples are waiting, {self.limit} may")
        if self._feeding is None:
            self._feeding = asyncio.ensure_future(self._feed())
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[Score]] = [loop.create_future() for _ in samples]
        self._waiting.extend(zip(samples, answers, strict=True))
        self._arrived.set()
        return list(await asyncio.gather(*answers))

    async def _feed(self) -> None:
        while True:
            await self._lanes.acquire()
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            if len(self._waiting) < self.size:
                await asyncio.sleep(GATHER)
            batch = [self._waiting.popleft() for _ in range(min(self.size, len(self._waiting)))]
            task = asyncio.ensure_future(self._score(batch))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _score(self, batch: Sequence[tuple[Sample, asyncio.Future[Score]]]) -> None:
        try:
            scores = await self.inner.score([sample for sample, _ in batch])
        except Exception as error:  # a caller waits for each of them
            scores = [Score.failed(f"raised {type(error).__name__}: {error}")] * len(batch)
        finally:
            self._lanes.release()
        for (_, answer), score in zip(batch, scores, strict=True):
            if not answer.done():
                answer.set_result(score)

    async def close(self) -> None:
        if self._feeding is not None:
            self._feeding.cancel()
        for task in list(self._running):
            task.cancel()
        await self.inner.close()


@dataclass
class Counts:
    requests: int = 0
    scored: int = 0
    failed: int = 0


def app(name: str, scorer: Scorer, token: str | None, max_bytes: int) -> FastAPI:
    try:
        from fastapi import FastAPI, HTTPException, Request
        from fastapi.responses import JSONResponse
    except ImportError as error:
        raise UserError('serving a reward needs FastAPI: pip install "gesso[serve]"') from error

    made = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    counts = Counts()
    expected = f"Bearer {token}".encode()

    async def read(request: Request, parser: Callable[[bytes, Request], Any]) -> list[Sample]:
        given = request.headers.get("authorization", "").encode()
        if token is not None and not hmac.compare_digest(given, expected):
            raise HTTPException(401, "a bearer token is needed", {"WWW-Authenticate": "Bearer"})
        try:
            body = await asyncio.wait_for(receive(request), UPLOAD)
            return await parser(body, request)
        except asyncio.TimeoutError:
            raise HTTPException(408, f"a request may take {UPLOAD:g} s to arrive") from None
        except UserError as error:
            raise HTTPException(422, str(error)) from None

    async def receive(request: Request) -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise HTTPException(413, f"a request may have {max_bytes:,} bytes")
        return bytes(body)

    async def score(samples: Sequence[Sample]) -> list[Score]:
        counts.requests += 1
        try:
            scores = await scorer.score(samples)
        except Busy as error:
            raise HTTPException(503, str(error), {"Retry-After": "1"}) from None
        good = sum(s.error is None for s in scores)
        counts.scored += good
        counts.failed += len(scores) - good
        return scores

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"reward": name, **vars(counts)})

    async def score_them(request: Request) -> JSONResponse:
        multipart = request.headers.get("content-type", "").startswith("multipart/form-data")
        samples = await read(request, _multipart if multipart else _json)
        return JSONResponse(protocol.pack_scores(await score(samples), scorer.random))

    async def get_reward(request: Request) -> JSONResponse:
        scores = await score(await read(request, _openrlhf))
        errors = [s.error or "it does not apply" for s in scores if not s.ok]
        if errors:  # the protocol has no word for this, and a number would be a lie
            told = f"{len(errors)} of {len(scores)} could not be scored; the last: {errors[-1]}"
            raise HTTPException(422, told)
        return JSONResponse({"rewards": [s.value for s in scores]})

    made.add_route("/health", health, methods=["GET"])
    made.add_route("/score", score_them, methods=["POST"])
    made.add_route("/get_reward", get_reward, methods=["POST"])
    return made


async def _json(body: bytes, request: Any) -> list[Sample]:
    return await protocol.aside(len(body), protocol.read_score_request, body)


async def _openrlhf(body: bytes, request: Any) -> list[Sample]:
    return await protocol.aside(len(body), protocol.read_get_reward, body)


async def _multipart(body: bytes, request: Any) -> list[Sample]:
    from starlette.formparsers import MultiPartException, MultiPartParser

    async def whole() -> AsyncGenerator[bytes, None]:
        yield body

    try:
        form = await MultiPartParser(request.headers, whole(), max_part_size=len(body) + 1).parse()
    except MultiPartException as error:
        raise UserError(f"request: not multipart ({error})") from None
    text = form.get("samples")
    if not isinstance(text, str):
        raise UserError('request: expected a part "samples" with the samples as JSON')
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f'request: "samples" is not JSON ({error})') from None
    rows = parse(protocol.ScoreRequest, {"samples": given}, "request").samples
    files = [file for file in form.getlist("image") if not isinstance(file, str)]
    images: list[bytes | None] = [await file.read() for file in files]
    if images and len(images) != len(rows):
        raise UserError(f'request: {len(images)} parts "image" for {len(rows)} samples')
    protocol.check_pixels(images)
    pairs = zip(rows, images or [None] * len(rows), strict=True)
    return [await protocol.aside(len(body), protocol.sample_of, row, image) for row, image in pairs]


def serve(
    name: str, scorer: Scorer, host: str, port: int, token: str | None, max_bytes: int
) -> None:
    """Until SIGINT or SIGTERM; then requests in flight are answered and the workers ended."""
    serving.check_host(host, token)
    made = app(name, scorer, token, max_bytes)

    def started(address: str) -> None:
        print(f"serving {name} at {address}", flush=True)

    serving.serve(made, host, port, started, scorer.close)

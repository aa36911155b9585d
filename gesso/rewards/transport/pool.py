"""JSON by HTTP to several servers that do the same work.

Requests go to the server with the fewest in flight. A server that fails is left alone for a while,
longer every time, and then tried again; the request moves on to another one, or waits. Tried again
are transport errors, time-outs, 429 and 5xx; every other answer is final, good or bad.

Limits: seconds of one attempt, attempts, requests in flight at a server, bytes of an answer.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CONNECT = 10.0  # seconds to reach a server at all
FIRST_REST, LONGEST_REST = 0.5, 30.0  # seconds; doubled with every failure in between
TRIED_AGAIN = {408, 425, 429}  # and all 5xx
TOLD = 300  # characters of an answer that an error repeats


class Unanswered(Exception):
    """No usable answer; the reason in one sentence."""


class _TryAgain(Exception):
    """This attempt failed in a way that another may not. `after`: seconds the server asked for."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


@dataclass
class Server:
    url: str
    busy: int = 0  # requests in flight
    served: int = 0  # attempts so far, for taking turns
    failures: int = 0  # in a row
    failed_at: float = 0.0  # loop time
    rests_until: float = 0.0
    client: Any = None  # of httpx; one each, whose search for a connection stays short


class Pool:
    """Made anywhere, used on one event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        token: str | None = None,
        timeout: float = 60.0,
        retries: int = 6,
        in_flight: int = 16,
        max_answer: int = 2**22,
    ) -> None:
        self.servers = [Server(url.rstrip("/")) for url in urls]
        self.timeout = timeout
        self.retries = retries
        self.in_flight = in_flight
        self.max_answer = max_answer
        self._headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._jitter = random.Random()

    async def post(self, path: str, body: bytes) -> Any:
        return await self._request("POST", path, body)

    async def get(self, path: str) -> Any:
        return await self._request("GET", path, b"")

    async def _request(self, method: str, path: str, body: bytes) -> Any:
        """The JSON that some server answers with, or Unanswered."""
        reason = ""
        for _attempt in range(self.retries + 1):
            server = await self._take()
            started = _now()
            try:
                exchange = self._exchange(server, method, path, body)
                answer = await asyncio.wait_for(exchange, self.timeout)
                server.failures = 0
                return _json(answer)
            except asyncio.TimeoutError:
                reason = f"{server.url} gave no whole answer in {self.timeout:g} s"
                self._rest(server, started)
            except _TryAgain as error:
                reason = f"{server.url} {error}"
                self._rest(server, started, error.after)
            except Unanswered as error:
                raise Unanswered(f"{server.url} {error}") from None
            finally:
                self._give_back(server)
        times = "once" if self.retries == 0 else f"{self.retries + 1} times"
        raise Unanswered(f"{reason}; asked {times}")

    async def _exchange(self, server: Server, method: str, path: str, body: bytes) -> bytes:
        import httpx

        if server.client is None:
            server.client = httpx.AsyncClient(
                timeout=httpx.Timeout(None, connect=CONNECT),  # one clock: the attempt's
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
                headers=self._headers,
            )
        try:
            async with server.client.stream(method, server.url + path, content=body) as response:
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise Unanswered("answered compressed, though asked not to")
                answer = bytearray()
                async for chunk in response.aiter_raw():
                    answer += chunk
                    if len(answer) > self.max_answer:
                        raise Unanswered(f"answered with more than {self.max_answer:,} bytes")
        except httpx.TransportError as error:
            raise _TryAgain(f"failed: {type(error).__name__} {error}".rstrip()) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unanswered(f"cannot be asked: {type(error).__name__} {error}") from None
        if response.is_success:
            return bytes(answer)
        told = " ".join(answer[: 4 * TOLD].decode(errors="replace").split())[:TOLD]
        reason = f"answered {response.status_code}: {told}".rstrip(": ")
        if response.status_code in TRIED_AGAIN or response.status_code >= 500:
            raise _TryAgain(reason, _seconds(response.headers.get("retry-after", "")))
        raise Unanswered(reason)

    async def _take(self) -> Server:
        """The awake server with the fewest requests in flight; waits until there is one."""
        while True:
            now = _now()
            awake = [s for s in self.servers if s.rests_until <= now]
            free = [s for s in awake if s.busy < self.in_flight]
            if free:
                chosen = min(free, key=lambda s: (s.busy, s.served))
                chosen.busy += 1
                chosen.served += 1
                return chosen
            resting = [s.rests_until for s in self.servers if s.rests_until > now]
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await asyncio.wait([turn], timeout=min(resting) - now if resting else None)
            if not turn.done():
                self._waiting.remove(turn)

    def _give_back(self, server: Server) -> None:
        server.busy -= 1
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _rest(self, server: Server, started: float, asked: float = 0.0) -> None:
        """Exponential, with jitter. Requests that were in flight together fail together: that is
        one failure, not many."""
        if started < server.failed_at:
            return
        server.failures += 1
        server.failed_at = _now()
        seconds = min(LONGEST_REST, FIRST_REST * 2 ** min(server.failures - 1, 16))
        seconds = max(seconds * self._jitter.uniform(0.5, 1.5), min(asked, LONGEST_REST))
        server.rests_until = server.failed_at + seconds

    async def close(self) -> None:
        for server in self.servers:
            if server.client is not None:
                await server.client.aclose()
                server.client = None


def _now() -> float:
    return asyncio.get_running_loop().time()


def _seconds(header: str) -> float:
    """Retry-After in seconds; its other form, a date, counts as nothing."""
    return float(header) if header.strip().isdigit() else 0.0


def _json(answer: bytes) -> Any:
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        told = answer[:40].decode(errors="replace")
        raise Unanswered(f"answered with no JSON: {told!r}") from None

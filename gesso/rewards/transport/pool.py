"""JSON over HTTP to several equivalent servers.

Requests go to the server with the fewest in flight. A server that fails is not used during an
exponential backoff; its request goes to another server, or waits. Transport errors, time-outs, 429
and 5xx are retried; every other response is final.

Limits: seconds per attempt, attempts, requests in flight per server, bytes of a response.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from gesso.types import UserError

CONNECT_TIMEOUT = 10.0  # seconds
FIRST_BACKOFF, MAX_BACKOFF = 0.5, 30.0  # seconds; doubled with every failure
RETRIED_STATUSES = {408, 425, 429}  # and all 5xx
MAX_QUOTED = 300  # characters of a response in an error message


class NoResponse(Exception):
    """No usable response; the message is the reason."""


class _Retryable(Exception):
    """This attempt failed and another may succeed. `after`: seconds from Retry-After."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


@cache
def _certificates() -> ssl.SSLContext:
    """Shared by all clients: reading the authorities takes 30 ms."""
    import httpx

    return httpx.create_ssl_context()


@dataclass
class ServerState:
    url: str
    busy: int = 0  # requests in flight
    served: int = 0  # attempts so far; breaks ties
    failures: int = 0  # in a row
    failed_at: float = 0.0  # loop time
    retry_at: float = 0.0  # loop time; not used before
    client: Any = None  # httpx.AsyncClient; one per server keeps its connection list short


class ServerPool:
    """Can be created in any thread; must be used on one event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        token: str | None = None,
        timeout: float = 60.0,
        retries: int = 6,
        in_flight: int = 16,
        max_response: int = 2**22,
    ) -> None:
        self.servers = [ServerState(url.rstrip("/")) for url in urls]
        self.timeout = timeout
        self.retries = retries
        self.in_flight = in_flight
        self.max_response = max_response
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
        """The JSON of the first usable response; raises NoResponse if there is none."""
        reason = ""
        for _attempt in range(self.retries + 1):
            server = await self._acquire()
            started = _now()
            try:
                exchange = self._exchange(server, method, path, body)
                content = await asyncio.wait_for(exchange, self.timeout)
                server.failures = 0
                return _json(content)
            except asyncio.TimeoutError:
                reason = f"{server.url} sent no complete response within {self.timeout:g} s"
                self._back_off(server, started)
            except _Retryable as error:
                reason = f"{server.url} {error}"
                self._back_off(server, started, error.after)
            except NoResponse as error:
                raise NoResponse(f"{server.url} {error}") from None
            finally:
                self._release(server)
        times = "once" if self.retries == 0 else f"{self.retries + 1} times"
        raise NoResponse(f"{reason}; tried {times}")

    async def _exchange(self, server: ServerState, method: str, path: str, body: bytes) -> bytes:
        import httpx

        if server.client is None:
            server.client = httpx.AsyncClient(
                timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT),  # wait_for limits the attempt
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
                headers=self._headers,
                verify=_certificates(),
            )
        try:
            async with server.client.stream(method, server.url + path, content=body) as response:
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise NoResponse("sent a compressed response, which was not requested")
                content = bytearray()
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) > self.max_response:
                        raise NoResponse(f"returned more than {self.max_response:,} bytes")
        except httpx.TransportError as error:
            raise _Retryable(f"failed: {type(error).__name__} {error}".rstrip()) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NoResponse(f"cannot be used: {type(error).__name__} {error}") from None
        if response.is_success:
            return bytes(content)
        excerpt = " ".join(content[: 4 * MAX_QUOTED].decode(errors="replace").split())[:MAX_QUOTED]
        reason = f"returned {response.status_code}: {excerpt}".rstrip(": ")
        if response.status_code in RETRIED_STATUSES or response.status_code >= 500:
            raise _Retryable(reason, _seconds(response.headers.get("retry-after", "")))
        raise NoResponse(reason)

    async def _acquire(self) -> ServerState:
        """The available server with the fewest requests in flight; waits until there is one."""
        while True:
            now = _now()
            available = [s for s in self.servers if s.retry_at <= now]
            free = [s for s in available if s.busy < self.in_flight]
            if free:
                chosen = min(free, key=lambda s: (s.busy, s.served))
                chosen.busy += 1
                chosen.served += 1
                return chosen
            backoffs = [s.retry_at for s in self.servers if s.retry_at > now]
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await asyncio.wait([turn], timeout=min(backoffs) - now if backoffs else None)
            except asyncio.CancelledError:
                if turn.done():
                    self._wake_next()  # passes the turn on: this request is cancelled
                raise
            finally:
                if not turn.done():
                    self._waiting.remove(turn)

    def _release(self, server: ServerState) -> None:
        server.busy -= 1
        self._wake_next()

    def _wake_next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _back_off(self, server: ServerState, started: float, requested: float = 0.0) -> None:
        """Exponential, with jitter. Concurrent requests that fail together count as one failure."""
        if started < server.failed_at:
            return
        server.failures += 1
        server.failed_at = _now()
        seconds = min(MAX_BACKOFF, FIRST_BACKOFF * 2 ** min(server.failures - 1, 16))
        seconds = max(seconds * self._jitter.uniform(0.5, 1.5), min(requested, MAX_BACKOFF))
        server.retry_at = server.failed_at + seconds

    async def close(self) -> None:
        for server in self.servers:
            if server.client is not None:
                await server.client.aclose()
                server.client = None


def _now() -> float:
    return asyncio.get_running_loop().time()


def _seconds(header: str) -> float:
    """Retry-After in seconds; a date counts as 0."""
    return float(header) if header.strip().isdigit() else 0.0


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        excerpt = content[:40].decode(errors="replace")
        raise NoResponse(f"returned invalid JSON: {excerpt!r}") from None


def token_from(variable: str | None) -> str | None:
    """Tokens are read from the environment: recipes are copied into the run folder."""
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise UserError(f'token_env = "{variable}": this environment variable is not set')
    return token

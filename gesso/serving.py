"""Shared by all HTTP servers: host check, start and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

from gesso.types import UserError

if TYPE_CHECKING:
    from fastapi import FastAPI

GRACE = 5  # seconds for requests in flight at shutdown


def check_host(host: str, token: str | None) -> None:
    """Raises unless `host` is loopback or there is a token."""
    if not is_loopback(host) and not token:
        raise UserError(
            f"--host {host} accepts connections from other machines: add --token-env NAME, the "
            "environment variable that holds the token which clients must send"
        )


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def nothing() -> None:
    """The default for `ended`."""


def serve(
    app: FastAPI,
    host: str,
    port: int,
    started: Callable[[str], object],
    ended: Callable[[], Awaitable[None]] = nothing,
) -> None:
    """Serves until SIGINT or SIGTERM, then finishes the requests in flight. `started` is called
    with the address; `ended` is awaited last."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error}") from error
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else a response takes 40 ms
    asyncio.run(_serve(app, listening, started, ended))


async def _serve(
    app: Any,
    listening: socket.socket,
    started: Callable[[str], object],
    ended: Callable[[], Awaitable[None]],
) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Disabled in favour of the handlers below: uvicorn's raise the signal again after
            shutdown."""
            yield

    settings = uvicorn.Config(
        app,
        log_level="warning",
        lifespan="off",
        timeout_keep_alive=75,  # longer than clients keep an idle connection
        timeout_graceful_shutdown=GRACE,
    )
    server = Server(settings)

    def end() -> None:
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    host, port = listening.getsockname()[:2]
    if not serving.done():
        started(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    try:
        await serving
    finally:
        await ended()

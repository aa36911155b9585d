"""Servers for the tests: `gesso serve-reward` as a process, and one with injected faults."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gesso.rewards.transport import protocol
from gesso.types import Prompt, Sample
from tests import forked
from tests.waiting import Started

ROOT = Path(__file__).parent.parent.parent


def grey(value: int, text: str = "a grey sign", size: tuple[int, int] = (8, 12)) -> Sample:
    return Sample(Prompt(text), np.full((*size, 3), value, dtype=np.uint8), value)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Served(Started):
    """`gesso serve-reward …` until `end`; forked, or started as users do it."""

    def __init__(
        self, *arguments: str, port: int = 0, forks: bool = True, **environment: str
    ) -> None:
        command = ["serve-reward", *arguments, "--port", str(port)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        if forks:
            self.started_in(lambda log: forked.Gesso(command, environment, ROOT, Path(log.name)))
        else:
            super().__init__([sys.executable, "-m", "gesso.cli", *command], environment, ROOT)
        self.url = self.printed(r" at (http\S+)")[1]
        self.port = int(self.url.rpartition(":")[2])


@contextmanager
def served(*arguments: str, **more: Any) -> Iterator[Served]:
    one = Served(*arguments, **more)
    try:
        yield one
    finally:
        one.end()


class Rendezvous:
    """A barrier for `n` requests, over any number of servers (each has a separate loop)."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._arrived = 0
        self._lock = threading.Lock()

    async def wait(self) -> None:
        with self._lock:
            round_end = (self._arrived // self._n + 1) * self._n
            self._arrived += 1
        while self._arrived < round_end:
            await asyncio.sleep(0.001)


class Misbehaving:
    """A hand-written HTTP server. Each request takes the next fault of `faults`; after the last,
    "ok".

    A correct response has the brightness of the images, or a judge's rating of it, so that scores
    of different samples differ."""

    def __init__(
        self,
        faults: Sequence[str] = (),
        delay: float = 0.0,
        port: int = 0,
        rendezvous: Rendezvous | None = None,
        hold: Callable[[], bool] = lambda: True,
    ) -> None:
        """`hold`: no answer before it is true."""
        self.faults = list(faults)
        self.delay = delay
        self.rendezvous = rendezvous
        self.hold = hold
        self.requests: list[dict[str, Any]] = []  # bodies, in order of arrival
        self.heads: list[str] = []
        self.scored: list[float] = []  # brightness of every image that was scored
        self.most = 0  # concurrent requests
        self._now = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", port, limit=2**26)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Misbehaving:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heads.append(head.decode())
                lines = head.decode().split("\r\n")
                size = [int(x.split(":")[1]) for x in lines if x.lower().startswith("content-len")]
                body = await reader.readexactly(size[0] if size else 0)
                await self._answer(lines[0].split(" ")[1], body, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.requests.append(json.loads(body) if body else {"path": path})
        fault = self.faults.pop(0) if self.faults else "ok"
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            await asyncio.sleep(self.delay)
            if self.rendezvous:
                await self.rendezvous.wait()
            while not self.hold():
                await asyncio.sleep(0.001)
            await self._misbehave(fault, self._right(path, body), writer)
        finally:
            self._now -= 1

    def _right(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/v1/models":
            return {"data": [{"id": "tiny"}]}
        if path == "/get_reward":
            values = [_brightness(s) for s in protocol.read_get_reward(body)]
            answer: dict[str, Any] = {"rewards": values}
        elif path == "/v1/chat/completions":
            content = json.loads(body)["messages"][0]["content"]
            urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
            images = [protocol.decode_image(protocol.from_base64(url)) for url in urls]
            values = [float(image.mean()) / 255 for image in images]
            text = f"Final Score: {1 + 4 * values[0]:.4f}" if len(values) == 1 else _better(values)
            message = {"role": "assistant", "content": text}
            answer = {"choices": [{"message": message, "finish_reason": "stop"}]}
        else:
            values = [_brightness(s) for s in protocol.read_score_request(body).samples]
            answer = {"scores": [{"value": value} for value in values]}
        self.scored += values
        return answer

    async def _misbehave(
        self, fault: str, right: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        status, length, body = "200 OK", None, json.dumps(right).encode()
        if fault == "hang":
            await asyncio.sleep(600)
        elif fault == "close":
            raise ConnectionError
        elif fault == "half":
            length, body = len(body), body[: len(body) // 2]
        elif fault == "truncated":
            body = body[: len(body) // 2]
        elif fault == "garbage":
            body = os.urandom(5_000_000)
        elif fault == "count":
            body = json.dumps({key: rows[:-1] for key, rows in right.items()}).encode()
        elif fault in ("NaN", "Infinity", "1e999", "true", '"0.5"', "null"):
            key = "rewards" if "rewards" in right else "scores"
            first = fault if key == "rewards" else f'{{"value": {fault}}}'
            rest = [first, *(json.dumps(row) for row in right[key][1:])]
            body = f'{{"{key}": [{", ".join(rest)}]}}'.encode()
        elif fault == "drip":
            length = len(body)
        elif fault.startswith("body:"):
            body = fault.removeprefix("body:").encode()
        elif fault[0].isdigit():
            status, body = fault, b'{"detail": "not today"}'
        elif fault != "ok":
            raise AssertionError(fault)
        size = len(body) if length is None else length
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n\r\n".encode())
        if fault == "drip":
            for byte in body:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.2)
        writer.write(body)
        await writer.drain()
        if fault == "half":
            raise ConnectionError


def _better(brightness: Sequence[float]) -> str:
    """The verdict of a judge of pairs, who prefers the brighter image."""
    first, second = brightness[-2:]
    return f"I looked. Better: {0 if first == second else 1 if first > second else 2}"


def _brightness(sample: Sample) -> float:
    return float(sample.frames.mean()) / 255

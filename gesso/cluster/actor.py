"""The end of a worker that runs on a node of a Ray cluster.

A Ray actor answers one task after the other. Frames (`channel.py`) are the arguments and the
results of its calls, as bytes. Nothing heavy is imported before the environment is set.
"""

from __future__ import annotations

import importlib
import io
import os
import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from gesso.cluster.channel import pack_frame, read_frame


class CallMessages:
    """Messages of the calls of an actor, for `worker.serve` in another thread."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._busy = False

    def send(self, message: Mapping[str, Any], *data: bytes) -> None:
        self._results.put(pack_frame(message, data))

    def receive(self) -> tuple[dict[str, Any], list[bytes]]:
        if self._busy:
            self._results.put(None)
        self._busy = True
        return read_frame(io.BytesIO(self._tasks.get()).read)

    def call(self, task: bytes) -> Iterator[bytes]:
        """All messages until the worker is ready for the next task."""
        self._tasks.put(task)
        while (result := self._results.get()) is not None:
            yield result

    def shut(self) -> None:
        """Ray ends the process."""


class Actor:
    def __init__(self, version: str, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        import gesso
        from gesso.cluster.launched import forward_output
        from gesso.cluster.processes import MODULE

        if gesso.__version__ != version:
            raise RuntimeError(
                f"this node has gesso {gesso.__version__}, but the driver has {version}; install "
                "the same version on all nodes"
            )
        serve = importlib.import_module(MODULE).serve
        self._messages = CallMessages()
        forward_output(self._messages)
        threading.Thread(target=serve, args=(self._messages,), daemon=True).start()

    def answer(self, task: bytes) -> Iterator[bytes]:
        yield from self._messages.call(task)

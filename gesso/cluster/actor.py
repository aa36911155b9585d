"""The end of a worker that runs on a node of a Ray cluster.

Frames (`channel.py`) are the arguments and the results of an actor's calls, as bytes. A call whose
connection breaks is repeated by the driver; the worker gets its task once. Nothing heavy is
imported before the environment is set.
"""

from __future__ import annotations

import importlib
import io
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from gesso.cluster.channel import pack_frame, read_frame


class CallMessages:
    """Messages of the calls of an actor, for `worker.serve` in another thread. They are kept until
    the driver has received them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: dict[int, bytes] = {}  # calls that have not begun
        self._attempts: dict[int, int] = {}  # the latest of each call that has not been answered
        self._ends = [0]  # messages before each call
        self._begun = 0  # calls
        self._kept: list[bytes] = []
        self._dropped = 0  # messages before those that are kept

    def send(self, message: Mapping[str, Any], *data: bytes) -> None:
        with self._changed:
            self._kept.append(pack_frame(message, data))
            self._changed.notify_all()

    def receive(self) -> tuple[dict[str, Any], list[bytes]]:
        with self._changed:
            if self._begun:
                self._ends.append(self._sent)
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._begun in self._tasks)
            task = self._tasks.pop(self._begun)
            self._begun += 1
        return read_frame(io.BytesIO(task).read)

    def call(self, number: int, attempt: int, received: int, task: bytes) -> Iterator[bytes]:
        """All messages until the worker is ready for the next task, without the first `received`
        ones. A call may arrive again, which ends earlier attempts, or before an earlier call."""
        with self._changed:
            self._attempts[number] = max(attempt, self._attempts.get(number, attempt))
            del self._kept[: max(0, received - self._dropped)]
            self._dropped = max(received, self._dropped)
            if number >= self._begun:
                self._tasks[number] = task
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._ends) > number or self._stale(number, attempt))
            received = max(received, self._dropped, *self._ends[number : number + 1])
        while (message := self._after(received, number, attempt)) is not None:
            yield message
            received += 1

    def _after(self, received: int, number: int, attempt: int) -> bytes | None:
        """The next message of this call; None after the last one, or if the attempt has failed."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    received < self._sent or self._answered(number) or self._stale(number, attempt)
                )
            )
            if self._stale(number, attempt):
                return None
            if self._answered(number) and received >= self._ends[number + 1]:
                del self._attempts[number]
                return None
            return self._kept[received - self._dropped]

    def _answered(self, number: int) -> bool:
        return len(self._ends) > number + 1

    def _stale(self, number: int, attempt: int) -> bool:
        return self._attempts.get(number) != attempt

    @property
    def _sent(self) -> int:
        return self._dropped + len(self._kept)

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

    def answer(self, *call: Any) -> Iterator[bytes]:
        yield from self._messages.call(*call)

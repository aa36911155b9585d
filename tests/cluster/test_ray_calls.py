"""Calls of a Ray actor whose connection breaks: every task and every message arrives once, and in
order. Ray and its network are played by threads; `make test-ray` breaks a real network."""

from __future__ import annotations

import itertools
import queue
import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from gesso.cluster import ray_actors
from gesso.cluster.actor import CallMessages
from gesso.cluster.channel import pack_frame
from gesso.cluster.ray_actors import CallingMessages
from gesso.cluster.ray_nodes import Node

TASKS = 60


class RayError(Exception):
    pass


class Unavailable(RayError):
    pass


class Network:
    """Calls an actor, and loses calls and messages."""

    exceptions = SimpleNamespace(RayError=RayError, ActorUnavailableError=Unavailable)

    def __init__(self, messages: CallMessages, seed: int) -> None:
        self.answer = SimpleNamespace(options=lambda num_returns: self)
        self._messages = messages
        self._random = random.Random(seed)
        self.calls: list[Any] = []
        self.lost = 0

    def remote(self, *call: Any) -> Iterator[Any]:
        """Breaks before the call has arrived, after a few messages or not at all."""
        self.calls.append(call)
        arriving = self._random.choice([-1, 0, 1, 2, 99, 99])
        references: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def run() -> None:
            stream = self._messages.call(*call)
            for message in itertools.islice(stream, arriving):
                references.put(lambda message=message: message)
            references.put(self._lose if arriving < 99 else None)

        if arriving < 0:
            return iter([self._lose])
        threading.Thread(target=run, daemon=True).start()
        return iter(references.get, None)

    def _lose(self) -> bytes:
        self.lost += 1
        raise Unavailable

    def get(self, reference: Any) -> bytes:
        return reference()


@dataclass(frozen=True)
class Played(Node):
    refused: bool

    def refuses(self) -> bool:
        return self.refused


LISTENS, ENDED = (Played("10.0.0.1", 1, 1, 0, refused) for refused in (False, True))


def work(messages: CallMessages) -> None:
    """What a worker does: messages before the first task, between tasks and as answers."""
    messages.send({"line": "ready"})
    while True:
        content, data = messages.receive()
        for i in range(content["task"] % 4):
            messages.send({"task": content["task"], "answer": i}, *data)


def received(driver: CallingMessages, count: int) -> list[Any]:
    """The next messages, or the EOFError that ends them; fails if they do not arrive."""
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            for _ in range(count):
                messages.put(driver.receive())
        except EOFError as error:
            messages.put(error)

    threading.Thread(target=run, daemon=True).start()
    return [messages.get(timeout=30) for _ in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_tasks_and_messages_arrive_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actors, "AGAIN", 0.0)
    actor = CallMessages()
    threading.Thread(target=work, args=(actor,), daemon=True).start()
    network = Network(actor, seed)
    driver = CallingMessages(network, network, LISTENS)
    expected: list[Any] = [({"line": "ready"}, [])]
    for task in range(TASKS):
        driver.send({"task": task}, b"x" * task)
        answers = [{"task": task, "answer": i} for i in range(task % 4)]
        expected += [(answer, [b"x" * task]) for answer in answers]
    assert received(driver, len(expected)) == expected
    assert network.lost > TASKS / 4
    attempts = [call[:2] for call in network.calls]  # number, attempt
    assert len(set(attempts)) == len(attempts) > TASKS
    driver.shut()
    with pytest.raises(EOFError):
        driver.receive()


def test_earlier_attempts_of_a_repeated_call_end() -> None:
    """They would occupy the actor's threads until the worker has finished its task."""
    actor = CallMessages()
    task = pack_frame({"task": 0}, ())
    first, second = (
        threading.Thread(target=list, args=(actor.call(0, attempt, 0, task),), daemon=True)
        for attempt in (1, 2)
    )
    first.start()
    assert actor.receive() == ({"task": 0}, [])
    assert first.is_alive()
    second.start()
    first.join(30)
    assert not first.is_alive() and second.is_alive()
    assert not actor._tasks  # a task that has begun is not kept again


def test_calls_of_a_node_that_has_ended_or_of_a_closed_driver_are_not_repeated() -> None:
    """A repeated call after `ray.shutdown()` would start a local Ray."""

    class Down(Network):
        def remote(self, *call: Any) -> Iterator[Any]:
            self.calls.append(call)
            return iter([self._lose])

    for node in (ENDED, LISTENS):
        network = Down(CallMessages(), 0)
        driver = CallingMessages(network, network, node)
        driver.send({"task": 0})
        if node is LISTENS:
            driver.shut()
        (end,) = received(driver, 1)
        assert isinstance(end, EOFError) and len(network.calls) == 1
        assert driver.error == ("the node has ended" if node is ENDED else "")


def test_a_node_that_has_ended_refuses_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = Node("127.0.0.1", server.getsockname()[1], 1, 0)
        assert not node.refuses()
    assert node.refuses()

"""Where simulated tasks run: each on a device of its own, or all on the cores of one machine."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Ended = Callable[[], None]
"""Called when a task has ended; may start others."""


class Devices(Protocol):
    now: float

    def start(self, seconds: float, ended: Ended, slower: float = 1.0) -> None:
        """A task that takes so many seconds alone; `slower`: times as many beside other tasks."""

    def run_next(self) -> None:
        """Continues until the next task ends."""

    def run_until(self, moment: float) -> None: ...


class OwnDevices:
    """One for each task, so that no task affects another."""

    def __init__(self) -> None:
        self.now = 0.0
        self._running: list[tuple[float, int, Ended]] = []
        self._numbers = itertools.count()  # tasks that end together end in the order of starting

    def start(self, seconds: float, ended: Ended, slower: float = 1.0) -> None:
        heapq.heappush(self._running, (self.now + seconds, next(self._numbers), ended))

    def run_next(self) -> None:
        self.now, _, ended = heapq.heappop(self._running)
        ended()

    def run_until(self, moment: float) -> None:
        while self._running and self._running[0][0] <= moment:
            self.run_next()
        self.now = max(self.now, moment)


@dataclass
class _Task:
    left: float  # seconds alone
    ended: Ended
    slower: float
    speed: float = 1.0


class SharedCores:
    """Tasks of one thread each. More tasks than cores get equal shares of them, as from the
    scheduler of an operating system. Two tasks or more slow each other down even on separate cores,
    since they share caches and memory bandwidth."""

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.now = 0.0
        self._running: list[_Task] = []

    def start(self, seconds: float, ended: Ended, slower: float = 1.0) -> None:
        self._running.append(_Task(seconds, ended, slower))
        self._set_speeds()

    def run_next(self) -> None:
        self._advance(min(task.left / task.speed for task in self._running))

    def run_until(self, moment: float) -> None:
        while self._running:
            first = min(task.left / task.speed for task in self._running)
            if self.now + first > moment:
                self._advance(moment - self.now)
                break
            self._advance(first)
        self.now = max(self.now, moment)

    def _advance(self, seconds: float) -> None:
        self.now += seconds
        for task in self._running:
            task.left -= seconds * task.speed
        done = [task for task in self._running if task.left <= ROUNDING]
        self._running = [task for task in self._running if task.left > ROUNDING]
        self._set_speeds()
        for task in done:
            task.ended()

    def _set_speeds(self) -> None:
        share = min(1.0, self.cores / max(1, len(self._running)))
        for task in self._running:
            task.speed = share / (task.slower if len(self._running) > 1 else 1.0)


ROUNDING = 1e-9  # seconds


def shared(cores: float) -> Devices:
    return OwnDevices() if cores == math.inf else SharedCores(int(cores))

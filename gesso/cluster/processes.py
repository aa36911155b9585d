"""Worker processes on this machine: watched and ended by the driver, and started by it or by
torchrun. `ray_actors.py` starts them on other machines.

Each worker has a socket for messages and one that nobody writes to: when the driver ends, in
whatever way, the second one closes and the worker exits.
"""

from __future__ import annotations

import copy
import itertools
import os
import queue
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gesso import imports
from gesso.cluster import launched
from gesso.cluster.channel import GRACE, Channel, Messages
from gesso.timeline import recorder
from gesso.track.progress import Progress
from gesso.types import StopRun, UserError, WorkerLost, out_of_memory

MODULE = "gesso.worker"
LAST_LINES = 8
"""Lines of a worker's output that are repeated when it dies."""
IDLE = "waiting for work"
COLLECTIVE = re.compile("gloo|nccl|connection (closed|reset)", re.IGNORECASE)
DROPPED_BEFORE = 0.5
"""Seconds until a worker that was dropped before counts as the cause of a failed collective."""
ERRORS: dict[str, type[Exception]] = {
    "UserError": UserError,
    "StopRun": StopRun,
    "ValueError": ValueError,
    "OSError": OSError,
    "MemoryError": MemoryError,
}
"""Errors of a worker that the driver raises as they are; the first that applies."""


class WorkerFailed(RuntimeError):
    """An unexpected exception in a worker; the message has its stack trace."""


class Life(Protocol):
    """A connection; when it closes, the worker ends."""

    def close(self) -> None: ...


@dataclass
class Worker:
    rank: int
    channel: Messages
    life: Life
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    doing: str = "starting"
    heard: float = field(default_factory=time.monotonic)  # time of its last message
    ended: bool = False
    needed: bool = True  # False: its end is an error only for those who use it
    dropped: bool = False  # the run continues without it
    inbox: queue.Queue[Message | int] = field(init=False)  # an int: this rank has ended
    row: str = field(init=False)  # of the timeline

    def __post_init__(self) -> None:
        self.row = recorder.worker(self.rank)

    def how_it_ended(self) -> str:
        return "closed its connection"

    def end(self, deadline: float) -> None:
        """It ends by itself, since the driver has closed its connections."""


@dataclass
class Child(Worker):
    """A process that the driver has started."""

    process: subprocess.Popen[str] = field(kw_only=True)

    def how_it_ended(self) -> str:
        try:
            code = self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            return super().how_it_ended()
        return f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def end(self, deadline: float) -> None:
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True)
class Message:
    rank: int
    content: dict[str, Any]
    data: Sequence[bytes]


class Processes:
    same_machine = True
    """Whether workers can read the files of the driver."""
    noticed = 10.0
    """Seconds in which the end of a worker is noticed."""

    def __init__(
        self,
        count: int,
        environment: Callable[[int], Mapping[str, str]],
        patience: float,
        progress: Progress,
        launch: launched.Launch | None = None,
    ) -> None:
        """`environment`: variables of a rank's process. `patience`: seconds for which a worker
        with a task may be silent. `progress` shows that of rank 0, and what any worker prints.
        `launch`: torchrun has started all processes, this one for rank 0, which needs a worker in
        addition."""
        self.first = 0
        self.count = self._end = count
        self.patience = patience
        self.progress = progress
        self._printed: set[str] = set()
        self._inbox: queue.Queue[Message | int] = queue.Queue()
        self.workers: list[Worker] = []
        self._numbers = itertools.count(1)  # of tasks
        self._number = 0  # of the newest one
        self._folder = tempfile.TemporaryDirectory(prefix="gesso-")
        try:
            for rank in range(count if launch is None else 1):
                self.workers.append(self._start(rank, environment(rank)))
            if launch is not None:
                for rank, (channel, life) in enumerate(launched.accept(launch, patience), 1):
                    self.workers.append(Worker(rank, channel, life))
            for worker in self.workers:
                worker.inbox = self._inbox
                threading.Thread(target=self._read_messages, args=(worker,), daemon=True).start()
        except BaseException:
            self.close()
            raise

    def part(self, first: int, count: int, needed: bool = True) -> Processes:
        """Some of the workers; another thread may use the others at the same time. Only the whole
        can be closed. `needed`: if one of these workers ends, users of the others fail, too."""
        part = copy.copy(self)
        part.first, part.count, part._end = first, count, first + count
        part._inbox = queue.Queue()
        for worker in part._own:
            worker.inbox, worker.needed = part._inbox, needed
        return part

    @property
    def _own(self) -> list[Worker]:
        return [worker for worker in self.workers[self.first : self._end] if not worker.dropped]

    @property
    def ranks(self) -> list[int]:
        return [worker.rank for worker in self._own]

    def drop(self, ranks: Sequence[int], needed: bool) -> None:
        """Goes on without these workers, which end if they have not. `needed`: as in `part`, of
        those that are left."""
        for rank in ranks:
            worker = self.workers[rank]
            worker.dropped = True
            worker.channel.shut()
            worker.life.close()
            self.count -= 1
        for worker in self._own:
            worker.needed = needed

    def _start(self, rank: int, environment: Mapping[str, str]) -> Worker:
        ours, theirs = socket.socketpair()
        life, watched = socket.socketpair()
        process = subprocess.Popen(
            imports.command(MODULE, str(theirs.fileno()), str(watched.fileno())),
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=[theirs.fileno(), watched.fileno()],
            start_new_session=True,  # Ctrl-C reaches only the driver, which then ends the workers
        )
        theirs.close()
        watched.close()
        worker = Child(rank, Channel(ours), life, process=process)
        threading.Thread(target=self._read_lines, args=(worker,), daemon=True).start()
        return worker

    def _read_messages(self, worker: Worker) -> None:
        while True:
            try:
                content, data = worker.channel.receive()
            except (EOFError, ValueError):
                worker.ended = True
                worker.inbox.put(worker.rank)
                return
            worker.heard = time.monotonic()
            if "spans" in content:
                recorder.received(worker.row, content.pop("spans"))
            if "doing" in content:
                worker.doing = content["doing"]
            elif "line" in content:
                self._show(worker, content["line"])
            elif "progress" in content:
                method, *arguments = content["progress"]
                if worker.rank == 0:
                    getattr(self.progress, method)(*arguments)
            else:
                worker.inbox.put(Message(worker.rank, content, data))

    def _read_lines(self, worker: Child) -> None:
        assert worker.process.stdout is not None
        for line in worker.process.stdout:
            self._show(worker, line)

    def _show(self, worker: Worker, line: str) -> None:
        text = line.rstrip()
        if not text:
            return
        worker.lines.append(text)
        if text not in self._printed:  # all ranks print the same warnings
            self._printed.add(text)
            self.progress.note(f"worker {worker.rank}: {text}")

    def send(self, rank: int, task: str, content: Mapping[str, Any], *data: bytes) -> None:
        worker = self.workers[rank]
        worker.heard, worker.doing = time.monotonic(), f"beginning to {task}"
        try:
            worker.channel.send({"task": task, "number": self._number, **content}, *data)
        except OSError:
            self._raise_ended(rank)

    def receive(self) -> Message:
        """The next message of any worker. Raises what a worker raised, or a StopRun that names a
        worker that has ended or does not answer."""
        while True:
            try:
                message = self._inbox.get(timeout=1.0)
            except queue.Empty:
                self.check()
                self._check_patience()
                continue
            rank = message if isinstance(message, int) else message.rank
            if self.workers[rank].dropped:
                continue
            if isinstance(message, int):
                self._raise_ended(rank)
            elif message.content.pop("number") == self._number:  # else of a task that was given up
                if "raised" in message.content:
                    if COLLECTIVE.search(message.content["text"]):
                        self._raise_if_ended()
                    self._raise(message)
                return message

    def _raise_if_ended(self) -> None:
        """A collective fails when another rank ends, and may be reported before its end."""
        started = time.monotonic()
        while (waited := time.monotonic() - started) < self.noticed:
            for worker in self.workers:
                if worker.ended and (not worker.dropped or waited > DROPPED_BEFORE):
                    self._raise_ended(worker.rank)
            time.sleep(0.02)

    def check(self) -> None:
        """Raises WorkerLost if a worker has ended: one of these, or one that all need."""
        for worker in self.workers:
            if worker.ended and not worker.dropped and (worker.needed or worker in self._own):
                self._raise_ended(worker.rank)

    def store(self) -> dict[str, Any]:
        """A new folder in which ranks find each other, or the host and port of a store."""
        return {"folder": tempfile.mkdtemp(dir=self._folder.name)}

    def address(self, rank: int) -> str:
        """The IP address at which the other ranks reach this one."""
        return launched.LOOPBACK

    def begin_task(self) -> None:
        """Drops messages about earlier tasks from now on: after a failure in one worker, the others
        may still send some."""
        self._number = next(self._numbers)

    def all(self, task: str, content: Mapping[str, Any], *data: bytes) -> list[dict[str, Any]]:
        """The answers of all workers to one task, by rank."""
        self.begin(task, content, *data)
        return self.answers()

    def begin(self, task: str, content: Mapping[str, Any], *data: bytes) -> None:
        """`all`, without waiting for the answers."""
        self.begin_task()
        for worker in self._own:
            self.send(worker.rank, task, content, *data)

    def answers(self) -> list[dict[str, Any]]:
        """Waits for an answer of every worker."""
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < self.count:
            message = self.receive()
            answers[message.rank] = message.content
        return [answers[rank] for rank in sorted(answers)]

    def one(self, rank: int, task: str, content: Mapping[str, Any], *data: bytes) -> dict[str, Any]:
        self.begin_task()
        self.send(rank, task, content, *data)
        return self.receive().content

    def data(self, rank: int, task: str, content: Mapping[str, Any]) -> bytes:
        """The bytes that a worker answers."""
        self.begin_task()
        self.send(rank, task, content)
        return self.receive().data[0]

    def name(self, rank: int) -> str:
        return f"worker {rank}"

    def _raise(self, message: Message) -> None:
        """Raises what a worker raised. Errors that depend on its machine name the worker."""
        kind, text = message.content["raised"], message.content["text"]
        if kind == "OSError":
            raise OSError(f"{self.name(message.rank)}: {text}")
        if kind in ERRORS:
            raise ERRORS[kind](text)
        if out_of_memory(RuntimeError(text)):
            raise MemoryError(f"{self.name(message.rank)}: {text}")
        raise WorkerFailed(f"{self.name(message.rank)} failed:\n{message.content['trace']}")

    def _check_patience(self) -> None:
        now = time.monotonic()
        silent = [w for w in self._own if w.doing != IDLE and now - w.heard > self.patience]
        # A worker that waits for the others is not the cause.
        stuck = [w for w in silent if not w.doing.startswith("waiting")]
        for worker in stuck or silent:
            raise WorkerLost(
                f"worker {worker.rank} has not answered for cluster.patience = {self.patience:g} "
                f"s while {worker.doing}",
                worker.rank,
            )

    def _raise_ended(self, rank: int) -> None:
        worker = self.workers[rank]
        how = worker.how_it_ended()
        last = f"; its last output: {' | '.join(worker.lines)}" if worker.lines else ""
        raise WorkerLost(f"worker {rank} ended while {worker.doing} ({how}){last}", rank)

    def close(self) -> None:
        """Ends all workers, at the latest after a few seconds."""
        for worker in self.workers:
            worker.channel.shut()
            worker.life.close()
        deadline = time.monotonic() + GRACE
        for worker in self.workers:
            worker.end(deadline)
        self.workers = []
        self._folder.cleanup()

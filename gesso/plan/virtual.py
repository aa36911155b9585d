"""Simulated workers and rewards: their tasks advance a virtual clock and compute nothing.

`cluster/workers.py` uses these workers like real ones: it cuts a batch into parts, assigns them to
idle workers and waits for their answers. `Rates` defines how long each task takes on a device of
its own, and `cores.py` how long it takes beside others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gesso.cluster.processes import Message
from gesso.config import Recipe
from gesso.models.tokens.packing import even_count
from gesso.plan.cores import Devices
from gesso.plan.rates import Rates
from gesso.ranks import Alone, deal
from gesso.rewards.transport import wire
from gesso.rewards.transport.service import Scored
from gesso.track.checkpoints import write_tensors
from gesso.track.progress import SILENT
from gesso.types import Prompt, Sample, Score

NO_PROMPT = Prompt("")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def seconds(self) -> float:
        return self.now

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


@dataclass(frozen=True)
class Span:
    """One worker did something from `start` to `end`; rank −1: the driver."""

    rank: int
    phase: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Load:
    """Sizes of an update."""

    updates: int  # optimizer steps per pass
    epochs: int
    terms: int  # per sample
    micro: int  # most terms of a micro-batch
    in_step: bool  # every worker must run equally many passes
    even: bool = False  # micro-batches are about equally large; otherwise the last one is smaller

    def micro_batches(self, samples: int) -> list[int]:
        """Terms of each micro-batch of a mini-batch."""
        mini = self.terms * samples // self.updates
        if not self.even:
            return [min(self.micro, mini - first) for first in range(0, mini, self.micro)]
        count = even_count(-(-mini // self.micro), mini)
        return [mini // count + (i < mini % count) for i in range(count)]


class _Ranks(Alone):
    """Ranks for `deal`, which exchange nothing."""

    def __init__(self, count: int, in_step: bool) -> None:
        self.count = count
        self.in_step = in_step
        self.slowness = [1.0] * count


class VirtualProcesses:
    """Replaces `cluster.processes.Processes`. All workers are equally fast."""

    progress = SILENT
    same_machine = True
    first = 0

    def __init__(
        self, count: int, rates: Rates, load: Load, clock: Clock, devices: Devices
    ) -> None:
        self.count = count
        self.rates = rates
        self.load = load
        self.clock = clock
        self.devices = devices
        self.spans: list[Span] = []
        self._calls: dict[str, Mapping[str, Any]] = {}
        self._messages: deque[tuple[float, Message]] = deque()  # with the moment of sending
        self._sizes: dict[str, int] = {}  # piece → samples
        self._dealt: tuple[list[float], float] = [], 0.0  # of the newest update
        self._training = 0  # workers that have not finished their micro-batches

    def begin_task(self) -> None:
        """Nothing fails here, so there are no late messages."""

    def send(self, rank: int, task: str, content: Mapping[str, Any], *data: bytes) -> None:
        """To a worker that has answered all earlier tasks."""
        self.devices.run_until(self.clock.now)
        getattr(self, f"_{task}")(rank, content)

    def receive(self) -> Message:
        while not self._messages:
            self.devices.run_next()
        moment, message = self._messages.popleft()
        self.clock.wait_until(moment)
        if "piece" in message.content:
            start = self.clock.now
            self.clock.wait_until(start + self.rates.driver * len(message.content["index"]))
            self.spans.append(Span(-1, "receive", start, self.clock.now))
        return message

    def answers(self) -> list[dict[str, Any]]:
        found = [self.receive() for _ in range(self.count)]
        return [m.content for m in sorted(found, key=lambda m: m.rank)]

    def all(self, task: str, content: Mapping[str, Any], *data: bytes) -> list[dict[str, Any]]:
        for rank in range(self.count):
            self.send(rank, task, content, *data)
        return self.answers()

    def one(self, rank: int, task: str, content: Mapping[str, Any], *data: bytes) -> dict[str, Any]:
        self.send(rank, task, content, *data)
        return self.receive().content

    def close(self) -> None:
        """There is no process."""

    # Tasks

    def _compute(
        self,
        rank: int,
        phase: str,
        seconds: float,
        then: Callable[[], None],
        slower: float = 1.0,
    ) -> None:
        """Calls `then` when this worker has computed for so many seconds of its own device."""
        start = self.devices.now

        def ended() -> None:
            if self.devices.now > start:
                self.spans.append(Span(rank, phase, start, self.devices.now))
            then()

        self.devices.start(seconds, ended, slower)

    def _post(self, rank: int, content: Mapping[str, Any], *data: bytes) -> None:
        self._messages.append((self.devices.now, Message(rank, dict(content), list(data))))

    def _answer(self, rank: int, phase: str, seconds: float, answer: Mapping[str, Any]) -> None:
        self._compute(rank, phase, seconds, partial(self._post, rank, answer))

    def _teach(self, rank: int, content: Mapping[str, Any]) -> None:
        self._post(rank, {})

    def _open(self, rank: int, content: Mapping[str, Any]) -> None:
        self._calls[content["key"]] = content
        prompts = len(set(content["row"]))
        self._answer(rank, "open", prompts * self.rates.encode + self.rates.gather, {})

    def _sample(self, rank: int, content: Mapping[str, Any]) -> None:
        call, start = self._calls[content["key"]], self.devices.now
        index, training = list(range(*content["only"])), call["step"] is not None
        cost = 1.0 if training else self.rates.eval_cost
        kind, slower = "" if training else "evaluate: ", self.rates.slower_sampling

        def decode() -> None:
            seconds = self.rates.decode(len(index))
            self._compute(rank, f"{kind}decode", seconds, finish, slower)

        def finish() -> None:
            if content["spare"]:
                return self._post(rank, {"busy": 0.0, "made": 0})
            samples = [Sample(NO_PROMPT, None, call["seeds"][i], text="") for i in index]
            name = f"{content['key']}/{index[0]}"
            self._sizes[name] = len(index)
            self._post(rank, {"piece": name, "index": index}, wire.pack_samples(samples))
            self._post(rank, {"busy": self.devices.now - start, "made": len(index)})

        self._compute(rank, f"{kind}sample", cost * self.rates.sample(len(index)), decode, slower)

    def _share(self, rank: int, content: Mapping[str, Any]) -> None:
        if self.count == 1:
            return self._post(rank, {"sent": 0})
        pieces = content["pieces"]
        samples = sum(self._sizes[name] for name in pieces)
        seconds = samples * self.rates.share + 3 * len(pieces) * self.rates.collective
        self._answer(rank, "share", seconds, {"sent": 0})

    def _describe(self, rank: int, content: Mapping[str, Any]) -> None:
        start = self.clock.now
        self.clock.wait_until(start + self.rates.between * len(content["rows"]))
        self.spans.append(Span(-1, "between", start, self.clock.now))
        self._post(rank, {"metrics": {}})

    def _update(self, rank: int, content: Mapping[str, Any]) -> None:
        """Every mini-batch ends when the last worker has finished its micro-batches."""
        samples, slower = len(content["rows"]), self.rates.slower_updating
        if self._training == 0:
            self._dealt, self._training = self._deal(samples), self.count
        busy, common = self._dealt
        start = self.devices.now

        def passes_ended() -> None:
            self._training -= 1
            if self._training == 0:
                for each in range(self.count):
                    self._compute(each, "exchange", common, partial(finish, each), slower)

        def finish(each: int) -> None:
            answer = {
                "metrics": {"update/grad_norm": 0.0, "time/update": self.devices.now - start},
                "advantages": [0.0] * samples,
                "busy": busy[each],
                "sent": 0,
                "memory": 0.0,
            }
            self._post(each, answer)

        self._compute(rank, "update", busy[rank], passes_ended, slower)

    def _deal(self, samples: int) -> tuple[list[float], float]:
        """Seconds of each worker in its passes, and of all workers in optimizer steps and
        collectives."""
        load, ranks = self.load, _Ranks(self.count, self.load.in_step)
        sizes = load.micro_batches(samples)
        dealt = deal(sizes, ranks)
        steps, counted = load.updates * load.epochs, [0] * self.count
        busy = [0.0] * self.count
        for size, owner in zip(sizes, dealt.owners, strict=True):
            counted[owner] += 1
            once = self.rates.prepare(size) * load.updates
            busy[owner] += self.rates.update(size) * steps + once
        if load.in_step:  # spare passes
            most = max(counted)
            for rank, count in enumerate(counted):
                busy[rank] += (most - count) * self.rates.update(sizes[0]) * steps
        owners = min(self.count, len(sizes))
        merging = 3 * owners * self.rates.collective
        return busy, steps * (self.rates.optimizer + self.rates.reduce + merging)

    def _publish(self, rank: int, content: Mapping[str, Any]) -> None:
        self._answer(rank, "publish", self.rates.publish, {"digest": ""})

    def _forget(self, rank: int, content: Mapping[str, Any]) -> None:
        self._post(rank, {})

    def _save(self, rank: int, content: Mapping[str, Any]) -> None:
        if rank == 0:
            write_tensors(Path(content["folder"]), {})  # the loop verifies the checkpoint
        self._answer(rank, "save", self.rates.save, {})

    def _written(self, rank: int, content: Mapping[str, Any]) -> None:
        self._post(rank, {"done": True, "shards": {}})


class VirtualRewards:
    """Replaces `RewardService`: its workers score each sample as soon as it is finished."""

    rewards: Sequence[Any] = ()
    processes = 0

    def __init__(self, recipe: Recipe, seconds: float, clock: Clock, devices: Devices) -> None:
        """`devices`: where samples are scored."""
        self.rewards = [_Named(entry.label) for entry in recipe.reward]
        self.seconds = seconds
        self.clock = clock
        self.devices = devices
        self.spans: list[Span] = []
        self.free = min((slots(entry) for entry in recipe.reward), default=1)
        self.waiting: deque[VirtualScoring] = deque()  # of each sample

    def score(self, scoring: VirtualScoring) -> None:
        """One more sample."""
        self.waiting.append(scoring)
        self._start()

    def _start(self) -> None:
        while self.free and self.waiting:
            self.free -= 1
            self.devices.start(self.seconds, partial(self._scored, self.waiting.popleft()))

    def _scored(self, scoring: VirtualScoring) -> None:
        self.free += 1
        scoring.left -= 1
        scoring.ended = self.devices.now
        self._start()

    def begin(
        self,
        groups: Sequence[int],
        held_out: bool = False,
        weights: Mapping[str, float] | None = None,
    ) -> VirtualScoring:
        return VirtualScoring(self, len(groups))

    def new_hits(self) -> int:
        return 0

    def close(self) -> None:
        """There is no process."""


@dataclass(frozen=True)
class _Named:
    name: str


def slots(entry: Any) -> int:
    """Samples that a reward scores at the same time."""
    remote = entry.remote
    return entry.workers if remote is None else len(remote.urls) * remote.in_flight


class VirtualScoring:
    def __init__(self, rewards: VirtualRewards, samples: int) -> None:
        self.service = rewards
        self.samples = samples
        self.left = 0  # added and not yet scored
        self.started = self.ended = rewards.clock.now

    pending = 0

    def add(self, index: Sequence[int], samples: Sequence[Sample]) -> None:
        self.service.devices.run_until(self.service.clock.now)
        self.left += len(index)
        for _ in index:
            self.service.score(self)

    def result(self, advance: Callable[[int], object] = lambda count: None) -> Scored:
        start = self.service.clock.now
        while self.left:
            self.service.devices.run_next()
        self.service.clock.wait_until(self.ended)
        if self.service.clock.now > start:
            self.service.spans.append(Span(-1, "wait for scores", start, self.service.clock.now))
        # different rewards, so that no group is flat, whichever reward decides it
        names = [reward.name for reward in self.service.rewards]
        scores = [Score(float(i), dict.fromkeys(names, float(i))) for i in range(self.samples)]
        return Scored(scores, self.started, self.ended)

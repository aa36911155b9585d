"""Simulated workers and rewards: their tasks advance a virtual clock and compute nothing.

`cluster/workers.py` uses these workers like real ones: it cuts a batch into parts, assigns them to
idle workers and waits for their answers. `Rates` defines how long each task takes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gesso.cluster.processes import Message
from gesso.config import Recipe
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
    micro: int  # terms per micro-batch
    in_step: bool  # every worker must run equally many passes


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

    def __init__(self, count: int, rates: Rates, load: Load, clock: Clock) -> None:
        self.count = count
        self.rates = rates
        self.load = load
        self.clock = clock
        self.spans: list[Span] = []
        self._calls: dict[str, Mapping[str, Any]] = {}
        self._free = [0.0] * count  # when each worker has finished its tasks
        self._events: list[tuple[float, int, Message]] = []
        self._posted = 0
        self._sizes: dict[str, int] = {}  # piece → samples
        self._plan: tuple[list[float], float] = [], 0.0  # of the newest update

    def begin_task(self) -> None:
        """Nothing fails here, so there are no late messages."""

    def send(self, rank: int, task: str, content: Mapping[str, Any], *data: bytes) -> None:
        start = max(self.clock.now, self._free[rank])
        self._free[rank] = end = getattr(self, f"_{task}")(rank, start, content)
        if end > start and task not in ("sample", "update"):
            self.spans.append(Span(rank, task, start, end))

    def receive(self) -> Message:
        moment, _, message = heapq.heappop(self._events)
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

    # Tasks: each returns when it ends

    def _answer(self, rank: int, end: float, content: Mapping[str, Any] | None = None) -> float:
        self._post(end, Message(rank, dict(content or {}), []))
        return end

    def _post(self, moment: float, message: Message) -> None:
        self._posted += 1  # messages of one moment arrive in the order of sending
        heapq.heappush(self._events, (moment, self._posted, message))

    def _teach(self, rank: int, start: float, content: Mapping[str, Any]) -> float:
        return self._answer(rank, start)

    def _open(self, rank: int, start: float, content: Mapping[str, Any]) -> float:
        self._calls[content["key"]] = content
        prompts = len(set(content["row"]))
        return self._answer(rank, start + prompts * self.rates.encode + self.rates.gather)

    def _sample(self, rank: int, start: float, content: Mapping[str, Any]) -> float:
        call = self._calls[content["key"]]
        index, training = list(range(*content["only"])), call["step"] is not None
        cost = 1.0 if training else self.rates.eval_cost
        sampled = start + cost * self.rates.sample(len(index))
        end = sampled + self.rates.decode(len(index))
        kind = "" if training else "evaluate: "
        self.spans.append(Span(rank, f"{kind}sample", start, sampled))
        if end > sampled:
            self.spans.append(Span(rank, f"{kind}decode", sampled, end))
        busy, made = 0.0, 0
        if not content["spare"]:
            made = len(index)
            samples = [Sample(NO_PROMPT, None, call["seeds"][i], text="") for i in index]
            name = f"{content['key']}/{index[0]}"
            self._sizes[name] = len(index)
            piece = {"piece": name, "index": index}
            self._post(end, Message(rank, piece, [wire.pack_samples(samples)]))
            busy = end - start
        return self._answer(rank, end, {"busy": busy, "made": made})

    def _share(self, rank: int, start: float, content: Mapping[str, Any]) -> float:
        if self.count == 1:
            return self._answer(rank, start, {"sent": 0})
        pieces = content["pieces"]
        samples = sum(self._sizes[name] for name in pieces)
        seconds = samples * self.rates.share + 3 * len(pieces) * self.rates.collective
        return self._answer(rank, start + seconds, {"sent": 0})

    def _describe(self, rank: int, start: float, content: Mapping[str, Any]) -> float:
        return self._answer(rank, start, {"metrics": {}})

    def _update(self, rank: int, start: float, content: Mapping[str, Any]) -> float:
        """Every mini-batch ends when the last worker has finished its micro-batches."""
        if rank == 0:
            self._plan = self._dealt(len(content["rows"]))
        busy, common = self._plan
        passes = max(busy)
        self.spans.append(Span(rank, "update", start, start + busy[rank]))
        if common:
            self.spans.append(Span(rank, "exchange", start + passes, start + passes + common))
        answer = {
            "metrics": {"update/grad_norm": 0.0, "time/update": passes + common},
            "advantages": [0.0] * len(content["rows"]),
            "busy": busy[rank],
            "sent": 0,
            "memory": 0.0,
        }
        return self._answer(rank, start + passes + common, answer)

    def _dealt(self, samples: int) -> tuple[list[float], float]:
        """Seconds of each worker in its passes, and of all workers in optimizer steps and
        collectives."""
        load, ranks = self.load, _Ranks(self.count, self.load.in_step)
        mini = load.terms * samples // load.updates
        sizes = [min(load.micro, mini - first) for first in range(0, mini, load.micro)]
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

    def _publish(self, rank: int, start: float, content: Mapping[str, Any]) -> float:
        return self._answer(rank, start + self.rates.publish, {"digest": ""})

    def _forget(self, rank: int, start: float, content: Mapping[str, Any]) -> float:
        return self._answer(rank, start)

    def _save(self, rank: int, start: float, content: Mapping[str, Any]) -> float:
        if rank == 0:
            write_tensors(Path(content["folder"]), {})  # the loop verifies the checkpoint
        return self._answer(rank, start + self.rates.save)

    def _written(self, rank: int, start: float, content: Mapping[str, Any]) -> float:
        return self._answer(rank, start, {"done": True, "shards": {}})


class VirtualRewards:
    """Replaces `RewardService`: its workers score each sample as soon as it is finished."""

    rewards: Sequence[Any] = ()
    processes = 0

    def __init__(self, recipe: Recipe, seconds: float, clock: Clock) -> None:
        self.rewards = [_Named(entry.label) for entry in recipe.reward]
        self.seconds = seconds
        self.clock = clock
        self.spans: list[Span] = []
        count = min((slots(entry) for entry in recipe.reward), default=1)
        self.free = [0.0] * count

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
        self.started = self.ended = rewards.clock.now

    pending = 0

    def add(self, index: Sequence[int], samples: Sequence[Sample]) -> None:
        free, now = self.service.free, self.service.clock.now
        for _ in index:
            start = max(now, heapq.heappop(free))
            end = start + self.service.seconds
            heapq.heappush(free, end)
            self.ended = max(self.ended, end)

    def result(self, advance: Callable[[int], object] = lambda count: None) -> Scored:
        start = self.service.clock.now
        self.service.clock.wait_until(self.ended)
        if self.service.clock.now > start:
            self.service.spans.append(Span(-1, "wait for scores", start, self.service.clock.now))
        # different rewards, so that no group is flat, whichever reward decides it
        names = [reward.name for reward in self.service.rewards]
        scores = [Score(float(i), dict.fromkeys(names, float(i))) for i in range(self.samples)]
        return Scored(scores, self.started, self.ended)

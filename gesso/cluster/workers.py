"""A cluster of worker processes, one per device, each with the model, a sampler and a rank of the
learner.

Samples of a call are cut into parts, which idle workers take from a common queue. Before an update
the workers exchange their samples, so that every rank has the whole rollout; the driver handles
images, texts, scores and metrics only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gesso import clock
from gesso.algorithms.base import Algorithm
from gesso.cluster import copies, speeds
from gesso.cluster.channel import pack_prompts, pack_spec, read_samples
from gesso.cluster.collecting import Request
from gesso.cluster.driver import Driver, DriverBatch
from gesso.cluster.placement import Placement, place_again
from gesso.cluster.processes import Message, Processes
from gesso.cluster.protocol import Batch
from gesso.cluster.remote_trace import RemoteTrace
from gesso.config import Recipe
from gesso.data.prompts import LargestPrompt, LoadedData, Stream, WeightedPrompts
from gesso.learner.learner import Update
from gesso.rewards.transport import wire
from gesso.rewards.transport.service import RewardService
from gesso.rollout import Rollout
from gesso.samplers.base import Piece, parts
from gesso.samplers.partial import Begun
from gesso.track.checkpoints import record_shards
from gesso.track.progress import SILENT, Progress
from gesso.track.writing import Writing
from gesso.types import Scales, StopRun, Which, WorkerLost


@dataclass(frozen=True)
class Call:
    """A request in the form in which workers get it."""

    request: Request
    content: dict[str, Any]
    data: Sequence[bytes]  # packed prompts and unfinished responses
    parts: Sequence[range]


class Samplers:
    """The samplers of all workers."""

    def __init__(self, recipe: Recipe, processes: Processes, gathers: bool) -> None:
        """`gathers`: whether a worker gathers sharded weights to sample. Otherwise workers sample
        in rounds, each of them with equally many passes."""
        self.recipe = recipe
        self.sampling = processes
        size = recipe.sampler.vllm.tensor_parallel  # workers that share an engine
        first, end = processes.first, processes.first + processes.count
        self._groups = [range(i, i + size) for i in range(first, end, size)]
        divided = recipe.cluster.sharding is not None and not recipe.cluster.samplers
        self._rounds = divided and not gathers
        self._calls = 0
        self._owners: dict[str, int] = {}  # piece → rank that sampled it
        self._shared: set[str] = set()  # pieces that all ranks have
        self._elapsed = 0.0  # seconds in which workers sampled or trained, in this step
        self._busy = [0.0] * end  # of these, the seconds in which each had work
        self._speeds = speeds.Speeds(end)

    def generate(self, request: Request) -> Iterator[Piece]:
        self._calls += 1
        key = f"{request.step}.{self._calls}"
        call = {
            "key": key,
            "step": request.step,
            "row": list(request.row),
            "seeds": list(request.seeds),
            "spec": pack_spec(request.spec),
        }
        batch = request.batch or self.recipe.sampler.batch
        cut = parts(request.row, batch, request.spec, request.prompts)
        prompts = pack_prompts(request.prompts, self.sampling.same_machine)
        begun = [] if request.begun is None else [request.begun.pack()]
        self.open(Call(request, call, [prompts, *begun], cut))
        started = clock.seconds()
        yield from self.deal(request, key, cut)
        if request.step is None:
            self.ask("forget", {"step": None})
            self.forget(None)
        else:
            self._elapsed += clock.seconds() - started

    def deal(self, request: Request, key: str, cut: Sequence[range]) -> Iterator[Piece]:
        """Idle workers sample these parts of a call. If a worker is lost and the others can
        continue, they sample its parts."""
        self.sampling.begin_task()
        waiting, idle = deque(cut), deque(self._groups)
        working: dict[int, range] = {}  # parts, by rank
        finished: set[str] = set()
        while waiting or working:
            ready = not self._rounds or not working
            try:
                while ready and idle and (waiting or self._rounds):
                    group, spare = idle.popleft(), not waiting
                    part = cut[0] if spare else waiting.popleft()
                    for rank in group:  # the first one returns the samples
                        call: dict[str, Any] = {"key": key, "only": [part.start, part.stop]}
                        call["spare"] = spare or rank != group.start
                        call["learner"] = self.destination(request)
                        working[rank] = part
                        self.sampling.send(rank, "sample", call)
                message = self.sampling.receive()
            except WorkerLost as error:
                self.lost(error)
                left = self.sampling.ranks
                idle = deque(group for group in idle if group.start in left)
                gone = [rank for rank in working if rank not in left]
                waiting.extend(dict.fromkeys(working.pop(rank) for rank in gone))
                continue
            if "piece" in message.content:
                name = message.content["piece"]
                self.sampled(name, message)
                if name not in finished:
                    finished.add(name)
                    yield self._piece(request, name, message.content["index"], message.data)
            else:
                (group,) = (group for group in self._groups if message.rank in group)
                if request.step is not None:
                    for rank in group:
                        self._busy[rank] += message.content["busy"]
                    self._speeds.add(message.rank, message.content["busy"], message.content["made"])
                del working[message.rank]
                if working.keys().isdisjoint(group):
                    idle.append(group)

    def open(self, call: Call) -> None:
        """Sends a call to the workers; its parts are assigned later."""
        self.ask("open", call.content, *call.data)

    def ask(self, task: str, content: Mapping[str, Any], *data: bytes) -> None:
        """Runs a task in all samplers."""
        self.sampling.all(task, content, *data)

    def lost(self, error: WorkerLost) -> None:
        """Raises the error, unless the other workers can continue."""
        raise error

    def destination(self, request: Request) -> int | None:
        """The rank to which a separate sampler sends traces."""
        return None

    def sampled(self, name: str, message: Message) -> None:
        self._owners[name] = message.rank

    def _piece(self, request: Request, name: str, index: list[int], data: Sequence[bytes]) -> Piece:
        packed, *begun = data
        samples = [
            replace(sample, prompt=request.prompts[request.row[i]])
            for i, sample in zip(index, read_samples(packed), strict=True)
        ]
        trace: Any = RemoteTrace([name], [(name, i) for i in range(len(index))])
        responses = Begun.read(begun[0]).responses if begun else ()
        return Piece(index, samples, trace, torch.empty(len(index), 0), responses)

    def forget(self, step: int | None) -> None:
        """Forgets the pieces of a step, or of an evaluation."""
        for name in [name for name in self._owners if name.startswith(f"{step}.")]:
            del self._owners[name]
            self._shared.discard(name)


class Workers(Samplers, Driver):
    def __init__(
        self,
        recipe: Recipe,
        algorithm: Algorithm,
        processes: Processes,
        rewards: RewardService,
        stream: Stream,
        gathers: bool,
        placement: Placement,
        progress: Progress = SILENT,
    ) -> None:
        self._placement = placement
        self._gathers = gathers
        Driver.__init__(self, recipe, algorithm, rewards, stream, progress)
        self._begin(processes)

    def _begin(self, processes: Processes) -> None:
        self._all = processes
        self.processes, sampling = self.divide(processes)
        Samplers.__init__(self, self.recipe, sampling, self._gathers)
        self._sent = 0  # bytes of the samples that workers exchanged, in this step
        self.processes.all("teach", {})
        self.publish(0)

    def divide(self, processes: Processes) -> tuple[Processes, Processes]:
        """The workers that train, and the workers that sample."""
        return processes, processes

    def restart(self) -> None:
        self._all.close()
        self.reset()
        self._placement = place_again(self._placement, self.recipe)
        self._begin(start(self.recipe, self._placement, self.progress))

    def describe(self, rollout: Rollout) -> dict[str, float]:
        content, scores = self._packed(rollout)
        return self.processes.one(0, "describe", content, scores)["metrics"]

    def train(self, rollout: Rollout, step: int, scales: Scales) -> Update:
        content, scores = self._packed(rollout)
        started = clock.seconds()
        slowness = self._speeds.slowness()
        order = {"step": step, "scales": asdict(scales), "slowness": speeds.dealt(slowness)}
        order |= content
        answers = self.processes.all("update", order, scores)
        self._elapsed += clock.seconds() - started
        for rank, answer in enumerate(answers):
            self._busy[rank] += answer["busy"]
        metrics: dict[str, float] = answers[0]["metrics"]
        metrics["memory/gb"] = max(answer["memory"] for answer in answers)
        metrics |= speeds.metrics(slowness)
        metrics |= self._idle()
        sent = self._sent + sum(answer["sent"] for answer in answers)
        metrics["cluster/sent_gb"] = sent / 1e9
        self._sent = 0
        self.processes.all("forget", {"step": step})
        self.forget(step)
        return Update(metrics, answers[0]["advantages"])

    def _idle(self) -> dict[str, float]:
        """Shares of the time since the last call."""
        idle = [1 - busy / self._elapsed for busy in self._busy]
        self._busy, self._elapsed = [0.0] * len(idle), 0.0
        each = {f"cluster/idle/{rank}": share for rank, share in enumerate(idle)}
        return {"cluster/idle": sum(idle) / len(idle), **each}

    def finish(self, batch: DriverBatch) -> Batch:
        """Workers exchange the samples while the last ones are scored."""
        assert batch.pending is not None
        self._exchange([piece.trace for piece in batch.pending.samples.pieces])
        return super().finish(batch)

    def _exchange(self, traces: Sequence[Any]) -> None:
        pieces = dict.fromkeys(name for trace in traces for name in trace.pieces)
        missing = [name for name in pieces if name not in self._shared]
        if missing:
            self.share(missing)

    def _packed(self, rollout: Rollout) -> tuple[dict[str, Any], bytes]:
        """A rollout for the workers, after they have exchanged its samples."""
        trace: Any = rollout.trace
        self._exchange([trace])
        number = {name: i for i, name in enumerate(trace.pieces)}
        content = {
            "pieces": list(trace.pieces),
            "rows": [(number[name], i) for name, i in trace.at],
            "group": rollout.group.tolist(),
            "version": rollout.version,
            "weights": dict(rollout.weights),
            "greedy": None if rollout.greedy is None else rollout.greedy.tolist(),
        }
        return content, wire.pack_scores(rollout.scores)

    def share(self, pieces: Sequence[str]) -> None:
        """Sends these pieces to all ranks that train."""
        owners = [self._owners[name] for name in pieces]
        answers = self.processes.all("share", {"pieces": pieces, "owners": owners})
        self._sent += sum(answer["sent"] for answer in answers)
        self._shared |= set(pieces)

    def exchange(self, version: int) -> bool:
        answers = self.processes.all("exchange", {"version": version})
        return all(answer["held"] for answer in answers)

    def send(self, copies: Collection[Which], version: int, kept: Collection[Which]) -> None:
        content = {"copies": sorted(copies), "version": version, "kept": sorted(kept)}
        answers = self.processes.all("publish", content)
        same_weights([answer["digest"] for answer in answers], version)

    def save(self, folder: Path) -> Writing:
        self.partial_batches.save(folder)
        copied = copies.are_needed(self.processes, folder)
        if copied and self.recipe.cluster.sharding == "all":
            raise StopRun(
                'with cluster.sharding = "all" every worker writes its part of a checkpoint, but '
                f"not all nodes see {folder}; use a run folder on a file system that all nodes "
                "share"
            )
        self.processes.all("save", {"folder": str(folder.resolve()), "copied": copied})
        return _WritingWorkers(self.processes, folder, copied)

    def load(self, folder: Path) -> None:
        self.processes.all("load", checkpoint(self.processes, folder))

    def stop(self) -> None:
        self._all.close()


def same_weights(digests: Sequence[str], version: int) -> None:
    for rank, found in enumerate(digests):
        if found != digests[0]:
            raise StopRun(
                f"the weights of worker {rank} differ from those of worker 0 after version "
                f"{version}: got digest {found}, expected {digests[0]}"
            )


@dataclass(frozen=True)
class _WritingWorkers:
    processes: Processes
    folder: Path
    copied: bool  # the first worker has written the files to its own machine

    def done(self) -> bool:
        return all(answer["done"] for answer in self.processes.all("written", {"wait": False}))

    def finish(self) -> None:
        answers = self.processes.all("written", {"wait": True})
        if self.copied:
            copies.fetch(self.processes, self.folder)
        found = {name: each for answer in answers for name, each in answer["shards"].items()}
        if found:
            record_shards(self.folder, found)


def checkpoint(processes: Processes, folder: Path) -> dict[str, Any]:
    """Arguments that locate a checkpoint for the workers. Workers that do not see it get a copy."""
    copied = copies.are_needed(processes, folder)
    if copied:
        copies.send(processes, folder)
    return {"folder": str(folder.resolve()), "copied": copied}


def start(recipe: Recipe, placement: Placement, progress: Progress) -> Processes:
    """Starts the workers; each loads the model."""
    progress.phase("starting workers")
    patience = recipe.cluster.patience
    processes: Processes
    if placement.on_ray is None:
        processes = Processes(
            placement.workers, placement.environment, patience, progress, placement.launch
        )
    else:
        from gesso.cluster.ray_actors import Actors

        processes = Actors(placement, patience, progress)
    try:
        begin(processes, recipe, placement.samplers)
    except BaseException:
        processes.close()
        raise
    return processes


def begin(processes: Processes, recipe: Recipe, samplers: int) -> None:
    """Builds the model and the learner in every worker, and connects the workers; the last ones
    only sample."""
    content = {"recipe": recipe.model_dump(mode="json"), "count": processes.count}
    content["samplers"] = samplers
    content["store"] = processes.store()
    processes.begin_task()
    for rank in range(processes.count):
        own = {"rank": rank, "address": processes.address(rank)}
        processes.send(rank, "start", {**content, **own})
    layouts = [answer["layout"] for answer in processes.answers()]
    for rank, found in enumerate(layouts):
        if found != layouts[0]:
            raise StopRun(
                f"worker {rank} has another model than worker 0: its trained weights differ in "
                f"names, shapes or dtypes; {recipe.model.path} must be the same on every machine"
            )


def fit(processes: Processes, data: LoadedData) -> LoadedData:
    """The prompts that the model can use, as determined by the first worker."""
    prompts = [*(p for part in data.train for p in part.prompts), *data.held_out]
    content = {
        "train": [len(part.prompts) for part in data.train],
        "weights": [part.weight for part in data.train],
    }
    found = processes.one(0, "fit", content, pack_prompts(prompts, processes.same_machine))
    train = [
        WeightedPrompts([prompts[i] for i in kept], part.weight)
        for kept, part in zip(found["train"], data.train, strict=True)
    ]
    return LoadedData(
        train,
        [prompts[i] for i in found["held_out"]],
        [*data.notes, *found["notes"]],
        [*data.left_out, *found["left_out"]],
        None if found["largest"] is None else LargestPrompt(*found["largest"]),
    )

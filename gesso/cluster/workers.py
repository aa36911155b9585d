"""A cluster of worker processes, one per device, each with the model, a sampler and a rank of the
learner.

Samples of a call are cut into parts, which idle workers take from a common queue. Before an update
the workers exchange their samples, so that every rank has the whole rollout; the driver handles
images, texts, scores and metrics only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gesso import clock
from gesso.algorithms.base import Algorithm
from gesso.cluster import copies, speeds
from gesso.cluster.channel import pack_prompts, pack_spec, read_samples
from gesso.cluster.collecting import Request
from gesso.cluster.driver import Driver
from gesso.cluster.placement import Placement, place_again
from gesso.cluster.processes import Processes
from gesso.cluster.remote_trace import RemoteTrace
from gesso.config import Recipe
from gesso.data.prompts import LoadedData, Stream, WeightedPrompts
from gesso.learner.learner import Update
from gesso.rewards.transport import wire
from gesso.rewards.transport.service import RewardService
from gesso.rollout import Rollout
from gesso.samplers.base import Piece, parts
from gesso.track.checkpoints import record_shards
from gesso.track.progress import SILENT, Progress
from gesso.track.writing import Writing
from gesso.types import Scales, StopRun, Which


class Samplers:
    """The samplers of all workers."""

    def __init__(self, recipe: Recipe, processes: Processes, gathers: bool) -> None:
        """`gathers`: whether a worker gathers sharded weights to sample. Otherwise workers sample
        in rounds, each of them with equally many passes."""
        self.recipe = recipe
        self.processes = processes
        size = recipe.sampler.vllm.tensor_parallel  # workers that sample together
        self._groups = [range(i, i + size) for i in range(0, processes.count, size)]
        self._rounds = recipe.cluster.sharding is not None and not gathers
        self._calls = 0
        self._owners: dict[str, int] = {}  # piece → rank that sampled it
        self._shared: set[str] = set()  # pieces that all ranks have
        self._elapsed = 0.0  # seconds in which workers sampled or trained, in this step
        self._busy = [0.0] * processes.count  # of these, the seconds in which each had work
        self._speeds = speeds.Speeds(processes.count)

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
        self.processes.all("open", call, pack_prompts(request.prompts, self.processes.same_machine))
        self.processes.begin_task()
        batch = request.batch or self.recipe.sampler.batch
        cut = parts(request.row, batch, request.spec, request.prompts)
        waiting, idle = deque(cut), deque(self._groups)
        working: set[int] = set()
        started = clock.seconds()
        while waiting or working:
            ready = not self._rounds or not working
            while ready and idle and (waiting or self._rounds):
                group, spare = idle.popleft(), not waiting
                part = cut[0] if spare else waiting.popleft()
                for rank in group:  # the first one returns the samples
                    call = {"key": key, "only": [part.start, part.stop]}
                    call["spare"] = spare or rank != group.start
                    self.processes.send(rank, "sample", call)
                working |= set(group)
            message = self.processes.receive()
            if "piece" in message.content:
                name = message.content["piece"]
                self._owners[name] = message.rank
                yield self._piece(request, name, message.content["index"], message.data[0])
            else:
                (group,) = (group for group in self._groups if message.rank in group)
                if request.step is not None:
                    for rank in group:
                        self._busy[rank] += message.content["busy"]
                    self._speeds.add(message.rank, message.content["busy"], message.content["made"])
                working.remove(message.rank)
                if working.isdisjoint(group):
                    idle.append(group)
        if request.step is None:
            self._forget(None)
        else:
            self._elapsed += clock.seconds() - started

    def _piece(self, request: Request, name: str, index: list[int], packed: bytes) -> Piece:
        samples = [
            replace(sample, prompt=request.prompts[request.row[i]])
            for i, sample in zip(index, read_samples(packed), strict=True)
        ]
        trace: Any = RemoteTrace([name], [(name, i) for i in range(len(index))])
        return Piece(index, samples, trace, torch.empty(len(index), 0))

    def _forget(self, step: int | None) -> None:
        self.processes.all("forget", {"step": step})
        dropped = {name for name in self._owners if name.startswith(f"{step}.")}
        self._owners = {name: r for name, r in self._owners.items() if name not in dropped}
        self._shared -= dropped


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
        Samplers.__init__(self, self.recipe, processes, self._gathers)
        self._sent = 0  # bytes of the samples that workers exchanged, in this step
        processes.all("teach", {})
        self.publish(0)

    def restart(self) -> None:
        self.processes.close()
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
        self._busy = [b + a["busy"] for b, a in zip(self._busy, answers, strict=True)]
        metrics: dict[str, float] = answers[0]["metrics"]
        metrics["memory/gb"] = max(answer["memory"] for answer in answers)
        metrics |= speeds.metrics(slowness)
        idle = [1 - busy / self._elapsed for busy in self._busy]
        metrics["cluster/idle"] = sum(idle) / len(idle)
        metrics |= {f"cluster/idle/{rank}": share for rank, share in enumerate(idle)}
        sent = self._sent + sum(answer["sent"] for answer in answers)
        metrics["cluster/sent_gb"] = sent / 1e9
        self._busy, self._elapsed, self._sent = [0.0] * len(answers), 0.0, 0
        self._forget(step)
        return Update(metrics, answers[0]["advantages"])

    def _packed(self, rollout: Rollout) -> tuple[dict[str, Any], bytes]:
        """A rollout for the workers, after they have exchanged its samples."""
        trace: Any = rollout.trace
        missing = [name for name in trace.pieces if name not in self._shared]
        if missing:
            owners = [self._owners[name] for name in missing]
            answers = self.processes.all("share", {"pieces": missing, "owners": owners})
            self._sent += sum(answer["sent"] for answer in answers)
            self._shared |= set(missing)
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

    def send(self, copies: Collection[Which], version: int) -> None:
        answers = self.processes.all("publish", {"copies": sorted(copies), "version": version})
        digests = [answer["digest"] for answer in answers]
        for rank, found in enumerate(digests):
            if found != digests[0]:
                raise StopRun(
                    f"the weights of worker {rank} differ from those of worker 0 after version "
                    f"{version}: got digest {found}, expected {digests[0]}"
                )

    def save(self, folder: Path) -> Writing:
        copied = copies.are_needed(self.processes, folder)
        if copied and self.recipe.cluster.sharding == "all":
            raise StopRun(
                'with cluster.sharding = "all" every worker writes its part of a checkpoint, but '
                f"not all nodes see {folder}; use a run folder that they share"
            )
        self.processes.all("save", {"folder": str(folder.resolve()), "copied": copied})
        return _WritingWorkers(self.processes, folder, copied)

    def load(self, folder: Path) -> None:
        self.processes.all("load", checkpoint(self.processes, folder))

    def stop(self) -> None:
        self.processes.close()


@dataclass(frozen=True)
class _WritingWorkers:
    processes: Processes
    folder: Path
    copied: bool  # the first worker has written them to its own machine

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
    """A checkpoint folder for the workers, which have copies if they do not see it."""
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
        begin(processes, recipe)
    except BaseException:
        processes.close()
        raise
    return processes


def begin(processes: Processes, recipe: Recipe) -> None:
    """Builds the model and the learner in every worker, and connects the workers."""
    content = {"recipe": recipe.model_dump(mode="json"), "count": processes.count}
    content["store"] = processes.store()
    processes.begin_task()
    for rank in range(processes.count):
        own = {"rank": rank, "address": processes.address(rank)}
        processes.send(rank, "start", {**content, **own})
    processes.answers()


def fit(processes: Processes, data: LoadedData) -> LoadedData:
    """The prompts that the model can use, as the first worker finds."""
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
        found["longest"],
    )

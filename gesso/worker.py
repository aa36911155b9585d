"""A worker process: model, sampler and one rank of the learner, built from a recipe.

Started by `cluster/processes.py`, torchrun (`cluster/launched.py`) or Ray (`cluster/actor.py`). It
answers one task after the other until the driver closes the connection; what it prints is read by
the driver.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import distributed

from gesso import build, families
from gesso.cluster.channel import Channel, Messages, end_with_the_driver, read_prompts, read_spec
from gesso.cluster.exchanging import Exchanging, Request, about, tensors_of
from gesso.cluster.host import keep_freed_memory, listen_at, peak_memory
from gesso.cluster.processes import ERRORS, IDLE
from gesso.cluster.saving import Saving
from gesso.cluster.tasks import TASKS, phase_of
from gesso.cluster.transfer import Transfers, layout
from gesso.config import Recipe
from gesso.data.prompts import LoadedData, WeightedPrompts
from gesso.ranks import Group
from gesso.rewards.transport import wire
from gesso.rollout import Rollout
from gesso.samplers.base import Piece, Sampler
from gesso.samplers.partial import Begun, options
from gesso.timeline import recorder
from gesso.traces.pieces import widened
from gesso.track import bars
from gesso.track.progress import Progress
from gesso.types import Prompt, Scales, Score
from gesso.use import teachers
from gesso.weights.history import History

NO_PROMPT = Prompt("")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def main() -> None:
    connection, life = (socket.socket(fileno=int(argument)) for argument in sys.argv[1:])
    end_with_the_driver(life)
    serve(Channel(connection))


def serve(channel: Messages) -> NoReturn:
    """Answers tasks until the driver closes the connection, and exits."""
    worker = Worker(channel)
    while True:
        try:
            content, data = channel.receive()
        except EOFError:
            break
        worker.number = content.pop("number")
        try:
            answer = worker.answer(content.pop("task"), content, data)
        except BaseException as error:
            answer = _raised(error)
        channel.send({"doing": IDLE})
        data = answer.pop("data", ())
        spans = recorder.to_send()
        channel.send({"number": worker.number, **answer, "spans": spans}, *data)
    os._exit(0)  # without waiting for other ranks, whose connections may be gone


def undivided(recipe: Recipe) -> Recipe:
    """The recipe of a separate sampler when learners shard the weights. It holds all weights, but
    does not fold adapters, so that it computes the same as the learners."""
    if recipe.cluster.sharding is None:
        return recipe
    cluster = recipe.cluster.model_copy(update={"sharding": None, "offload": False})
    model = recipe.model.model_copy(update={"fold": False})
    return recipe.model_copy(update={"cluster": cluster, "model": model})


def _numbered(device: torch.device) -> torch.device | None:
    """The device with its number, which NCCL requires."""
    if device.type == "cpu":
        return None
    return torch.device(device.type, torch.cuda.current_device())


def _raised(error: BaseException) -> dict[str, Any]:
    known = [name for name, kind in ERRORS.items() if isinstance(error, kind)]
    trace = "".join(traceback.format_exception(error))
    return {"raised": known[0] if known else "", "text": str(error), "trace": trace}


class _Reported:
    """Sends progress to the driver, which displays that of rank 0 and sees that the others work."""

    def __init__(self, channel: Messages) -> None:
        self.channel = channel

    def phase(self, text: str, total: int = 0) -> None:
        self.channel.send({"progress": ["phase", text, total]})

    def advance(self, done: int = 1) -> None:
        self.channel.send({"progress": ["advance", done]})

    def note(self, text: str) -> None:
        self.channel.send({"progress": ["note", text]})


class _ReportingGroup(Group):
    """Reports to the driver when this rank waits for others, to identify a rank that hangs."""

    def __init__(self, worker: Worker, in_step: bool) -> None:
        super().__init__(worker.model.device, in_step)
        self.worker = worker

    def before_waiting(self) -> None:
        doing = f"waiting for the other workers while {self.worker.doing}"
        self.worker.channel.send({"doing": doing})

    def after_waiting(self) -> None:
        self.worker.channel.send({"doing": self.worker.doing})


class Worker(Exchanging, Saving):
    def __init__(self, channel: Messages) -> None:
        self.channel = channel
        self.number = 0  # of the current task
        self.doing = ""
        self.requests: dict[str, Request] = {}
        self.transfers: Transfers | None = None  # connects samplers and learners
        self.pieces: dict[str, Piece] = {}  # by "request/first sample"

    def answer(
        self, task: str, content: Mapping[str, Any], data: Sequence[bytes]
    ) -> dict[str, Any]:
        self.doing = TASKS[task]
        self.channel.send({"doing": self.doing})
        step = self.requests[content["key"]].step if task == "sample" else content.get("step", 0)
        with recorder.phase(*phase_of(task, step)):
            return getattr(self, task)(*data, **content)

    def host(self, address: str) -> dict[str, Any]:
        """Opens a port at this address for torch's store, through which ranks find each other."""
        self.listener = socket.create_server((address, 0))
        return {"port": self.listener.getsockname()[1]}

    def start(
        self,
        recipe: Mapping[str, Any],
        rank: int,
        count: int,
        samplers: int,
        store: Mapping[str, Any],
        address: str,
    ) -> dict[str, Any]:
        """`samplers`: number of ranks, the last ones, that only sample. `store`: see
        `Processes.store`. `address`: where other ranks reach this one."""
        self.rank = rank
        self.progress: Progress = _Reported(self.channel)
        self.recipe: Recipe = build.recipe_from(recipe)
        learners = count - samplers
        trains = rank < learners
        if not trains:
            self.recipe = undivided(self.recipe)
        self.algorithm = build.algorithm(self.recipe)
        path = self.recipe.model.path
        with bars.loading(self.progress, path, path):
            self.model = build.model(self.recipe)
        device: torch.device = self.model.device
        listen_at(address)
        if distributed.is_initialized():
            distributed.destroy_process_group()
        joint = self._store(store, count)
        timeout = timedelta(seconds=2 * self.recipe.cluster.patience)  # the driver stops first
        # Samplers have a separate default group, since vLLM creates subgroups of all its members.
        distributed.init_process_group(
            BACKENDS[device.type],
            store=distributed.PrefixStore("learners" if trains else "samplers", joint),
            rank=rank if trains else rank - learners,
            world_size=learners if trains else samplers,
            timeout=timeout,
            device_id=_numbered(device),
        )
        self.transfers = None
        if samplers:
            self.transfers = Transfers.open(rank, device, learners, count, joint, timeout)
        if trains:
            sharding = self.recipe.cluster.sharding
            # Checkpoints are written while the default group is used to train.
            self.writers = distributed.new_group(backend="gloo") if sharding == "all" else None
            self.group = _ReportingGroup(self, sharding is not None)
            self.algorithm, self.learner = build.learner(
                self.recipe, self.algorithm, self.model, self.progress, self.group
            )
            self.history = History(self.recipe.lag)
        else:  # a critic changes how the model is run
            self.algorithm, _ = build.add_critic(self.recipe, self.algorithm, self.model)
        self.only_trains = trains and samplers > 0
        self.sampler = self._sampler()
        self.doing = "connecting to the other workers"
        if trains:  # NCCL connects in the first collective
            self.group.sum([torch.zeros(1, device=device)])
        if device.type == "cpu":
            keep_freed_memory()
        return {"layout": layout(self.model.policy.tensors())}

    def _sampler(self) -> Sampler:
        if self.recipe.sampler.engine == "vllm":
            if self.only_trains:  # needs no engine: it only encodes prompts and describes samples
                return build.built_in_sampler(self.recipe, self.model)
            self.progress.phase(f"starting {self.recipe.sampler.engine}")
        return build.sampler(self.recipe, self.algorithm, self.model)

    def _store(self, found: Mapping[str, Any], count: int) -> distributed.Store:
        if "folder" in found:
            return distributed.FileStore(str(Path(found["folder"]) / f"store-{count}"), count)
        hosts = self.rank == 0  # at the address of `host`; torch would listen at all addresses
        listener = self.listener.detach() if hosts else None
        return distributed.TCPStore(
            found["host"],
            found["port"],
            is_master=hosts,
            wait_for_workers=False,
            master_listen_fd=listener,
        )

    def fit(self, packed: bytes, train: Sequence[int], weights: Sequence[float]) -> dict[str, Any]:
        """The indices of the prompts that the model can use: `train` has the number of training
        prompts of each source; the held-out prompts follow."""
        prompts = read_prompts(packed)
        index = {id(prompt): i for i, prompt in enumerate(prompts)}
        parts, start = [], 0
        for size, weight in zip(train, weights, strict=True):
            parts.append(WeightedPrompts(prompts[start : start + size], weight))
            start += size
        data = LoadedData(parts, prompts[start:], [])
        family = families.of(self.recipe)
        data = family.fit(self.recipe, self.algorithm, self.model, data, self.progress)
        return {
            "train": [[index[id(p)] for p in part.prompts] for part in data.train],
            "held_out": [index[id(p)] for p in data.held_out],
            "notes": list(data.notes),
            "left_out": list(data.left_out),
            "largest": data.largest,
        }

    def teach(self) -> dict[str, Any]:
        """Loads the teachers, which only training needs."""
        teachers.teach(self.recipe, self.algorithm, self.learner)
        return {}

    def open(
        self,
        packed: bytes,
        *begun: bytes,
        key: str,
        step: int | None,
        row: Sequence[int],
        seeds: Sequence[int],
        spec: Mapping[str, Any],
    ) -> dict[str, Any]:
        request = Request(step, read_prompts(packed), row, seeds, read_spec(spec))
        request.begun = Begun.read(begun[0]) if begun else None
        request.shared = self.sampler.shared(request.prompts, request.spec)
        if not self.only_trains:  # or it would gather sharded weights
            self.sampler.prepare(request.spec.weights)
        self.requests[key] = request
        return {}

    def sample(
        self, key: str, only: Sequence[int], spare: bool, learner: int | None
    ) -> dict[str, Any]:
        """Sends every finished piece to the driver without its trace. This rank keeps the trace; a
        separate sampler sends it to `learner`. `spare`: the samples are dropped; this rank only
        runs passes in which other ranks need it."""
        started, made = time.perf_counter(), 0
        request = self.requests[key]
        prompts, row, seeds, begun = request.prompts, request.row, request.seeds, request.begun
        for piece in self.sampler.sample(
            prompts, row, seeds, request.spec, request.shared, range(*only), **options(begun)
        ):
            if spare:
                self.channel.send({"doing": self.doing})  # keeps the driver from assuming a hang
                continue
            made += len(piece.index)
            name = f"{key}/{piece.index[0]}"
            bare = [replace(sample, prompt=NO_PROMPT) for sample in piece.samples]
            message = {"number": self.number, "piece": name, "index": piece.index}
            data = [wire.pack_samples(bare)]
            if begun is not None and begun.limit:  # unfinished responses are not trained on
                data.append(Begun(piece.responses, 0).pack())
            elif self.transfers is None:
                without_images = [replace(sample, image=None, fps=None) for sample in piece.samples]
                self.pieces[name] = replace(piece, samples=without_images)
            elif learner is not None:
                parcel = self.transfers.send(key, learner, tensors_of(piece), about(piece))
                message["parcel"] = astuple(parcel)
            self.channel.send(message, *data)
        return {"busy": 0.0 if spare else time.perf_counter() - started, "made": made}

    def describe(self, scores: bytes, **rollout: Any) -> dict[str, Any]:
        return {"metrics": self.sampler.describe(self._rollout(scores, **rollout))}

    def update(
        self,
        scores: bytes,
        step: int,
        scales: dict[str, Any],
        slowness: Sequence[float],
        **rollout: Any,
    ) -> dict[str, Any]:
        self.group.slowness = slowness[: self.group.count]
        started, waited, sent = time.perf_counter(), self.group.waited, self.group.sent
        self.sampler.rest()
        self.learner.policy.release()
        update = self.learner.update(self._rollout(scores, **rollout), step, Scales(**scales))
        seconds = time.perf_counter() - started
        return {
            "metrics": update.metrics,
            "advantages": update.advantages,
            "busy": seconds - (self.group.waited - waited),
            "sent": self.group.sent - sent,
            "memory": peak_memory(self.model.device),
        }

    def _rollout(
        self,
        scores: bytes,
        pieces: Sequence[str],
        rows: Sequence[tuple[int, int]],
        group: Sequence[int],
        version: int,
        weights: Mapping[str, float],
        greedy: Sequence[float] | None,
    ) -> Rollout:
        """Row (i, j) is sample j of pieces[i]."""
        held = [self.pieces[name] for name in pieces]
        starts = [0]
        for piece in held:
            starts.append(starts[-1] + len(piece.index))
        index = [starts[i] + j for i, j in rows]
        samples = [sample for piece in held for sample in piece.samples]
        at = torch.tensor(index, dtype=torch.long)
        read: list[Score] = wire.read_scores(scores)
        return Rollout(
            samples=[samples[i] for i in index],
            group=torch.tensor(group),
            trace=type(held[0].trace).concat([piece.trace for piece in held]).rows(at),
            logp=widened([piece.logp for piece in held])[at],
            version=version,
            scores=read,
            weights=weights,
            greedy=None if greedy is None else torch.tensor(greedy, dtype=torch.float64),
        )

    def forget(self, step: int | None) -> dict[str, Any]:
        """Drops all samples of a step, or of an evaluation."""
        keys = {key for key, request in self.requests.items() if request.step == step}
        if self.transfers is not None:
            for key in keys:
                self.transfers.forget(key)
        self.requests = {key: r for key, r in self.requests.items() if key not in keys}
        self.pieces = {
            name: p for name, p in self.pieces.items() if name.partition("/")[0] not in keys
        }
        return {}

    # Sampling from a finished run

    def unfit(self, packed: bytes) -> dict[str, Any]:
        family = families.of(self.recipe)
        return {"reasons": [family.unfit(self.model, prompt) for prompt in read_prompts(packed)]}

    def inspect(self, packed: bytes, spec: Mapping[str, Any]) -> dict[str, Any]:
        family, prompts = families.of(self.recipe), read_prompts(packed)
        notes = family.check_prompts(self.model, prompts, read_spec(spec))
        return {"notes": notes, "truncated": family.truncated(self.model, prompts)}

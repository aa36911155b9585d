"""Workers as Ray actors, on the nodes of a cluster.

Ray places the actors, transports messages and reports actors that died; torch.distributed connects
them. They end with the driver, since Ray ends all actors of a job.
"""

from __future__ import annotations

import io
import itertools
import queue
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gesso
from gesso.cluster import ray_nodes
from gesso.cluster.actor import Actor
from gesso.cluster.channel import pack_frame, read_frame
from gesso.cluster.placement import Placement
from gesso.cluster.processes import Processes, Worker
from gesso.track.progress import Progress
from gesso.types import StopRun

BECAUSE = re.compile(r"(?:The actor is dead because|exception raised in the creation task).*")
"""The part of Ray's message about an actor that says why it died."""
AGAIN = 0.5
"""Seconds after which an interrupted call is repeated. Ray reports an actor that cannot be reached
as unavailable at first, and as dead once it has given up its node, after 15 s or more."""
CALLS = 16
"""Calls of an actor at a time, most of which wait for their turn."""


@dataclass
class Call:
    number: int
    task: bytes
    attempt: int = 0
    messages: Any = None  # a stream of references


class CallingMessages:
    """The driver's end of the connection to an actor: every message is a call."""

    def __init__(self, ray: Any, actor: Any, node: ray_nodes.Node) -> None:
        self._ray = ray
        self._actor = actor
        self._node = node
        self._shut = threading.Event()
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._call: Call | None = None  # the oldest one whose messages have not all been received
        self._numbers = itertools.count()
        self._received = 0  # messages
        self.error = ""  # why the actor is gone

    def send(self, message: Mapping[str, Any], *data: bytes) -> None:
        call = Call(next(self._numbers), pack_frame(message, data))
        self._begin(call)
        self._calls.put(call)

    def _begin(self, call: Call) -> None:
        call.attempt += 1
        answer = self._actor.answer.options(num_returns="streaming")
        call.messages = answer.remote(call.number, call.attempt, self._received, call.task)

    def receive(self) -> tuple[dict[str, Any], list[bytes]]:
        while not self._shut.is_set():  # after ray.shutdown(), a call would start another Ray
            if self._call is None:
                self._call = self._calls.get()
                if self._call is None:
                    break
            try:
                if self._call.messages is None:
                    self._begin(self._call)
                frame = self._ray.get(next(self._call.messages))
            except StopIteration:
                self._call = None
            except self._ray.exceptions.ActorUnavailableError as error:
                if self._node.refuses():
                    self.error = "the node has ended"
                    raise EOFError from error
                self._shut.wait(AGAIN)  # the network was interrupted
                self._call.messages = None
            except self._ray.exceptions.RayError as error:
                self.error = str(error)
                raise EOFError from error
            else:
                self._received += 1
                return read_frame(io.BytesIO(frame).read)
        raise EOFError

    def shut(self) -> None:
        self._shut.set()
        self._calls.put(None)


@dataclass(frozen=True)
class ActorLife:
    ray: Any
    actor: Any

    def close(self) -> None:
        self.ray.kill(self.actor)


@dataclass
class ActorWorker(Worker):
    node: str = field(kw_only=True)

    def how_it_ended(self) -> str:
        assert isinstance(self.channel, CallingMessages)
        error = self.channel.error
        reasons = BECAUSE.findall(error) or error.strip().splitlines() or ["Ray lost it"]
        reason = reasons[-1].removeprefix("The actor is dead because ").partition(". ")[0]
        return f"on Ray node {self.node}: {reason.rstrip('.')}"


class Actors(Processes):
    same_machine = False
    noticed = 30.0

    def __init__(self, placement: Placement, patience: float, progress: Progress) -> None:
        assert placement.on_ray is not None
        self._ray = ray_nodes.connect(placement.on_ray.address)
        gpus = placement.on_ray.gpus
        self._device = {"num_gpus": 1, "num_cpus": 0} if gpus else {"num_cpus": placement.threads}
        self._reserve(placement, patience)
        try:
            super().__init__(placement.workers, placement.environment, patience, progress)
        except BaseException:
            self.close()
            raise

    def _reserve(self, placement: Placement, patience: float) -> None:
        """A placement group, with neighbouring ranks on the same node."""
        from ray.util.placement_group import placement_group, placement_group_table

        bundle = {
            name.removeprefix("num_").upper().removesuffix("S"): float(amount)
            for name, amount in self._device.items()
            if amount
        }
        self._group = placement_group([bundle] * placement.workers, strategy="PACK")
        if not self._group.wait(patience):
            self._release()
            raise StopRun(
                f"the Ray cluster had no free resources for {placement.workers} workers within "
                f"cluster.patience = {patience:g} s; wait until other jobs have ended, or use "
                "fewer workers"
            )
        node_of = placement_group_table(self._group)["bundles_to_node_id"]
        self._bundles = sorted(node_of, key=lambda bundle: (node_of[bundle], bundle))
        nodes = {each["NodeID"]: ray_nodes.Node.of(each) for each in self._ray.nodes()}
        self._nodes = [nodes[node_of[bundle]] for bundle in self._bundles]

    def _start(self, rank: int, environment: Mapping[str, str]) -> Worker:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, self._bundles[rank])
        kind = self._ray.remote(Actor).options(
            **self._device,
            max_restarts=0,
            max_concurrency=CALLS,
            scheduling_strategy=strategy,
        )
        actor = kind.remote(gesso.__version__, dict(environment))
        messages = CallingMessages(self._ray, actor, self._nodes[rank])
        return ActorWorker(rank, messages, ActorLife(self._ray, actor), node=self.address(rank))

    def store(self) -> dict[str, Any]:
        host = self.address(0)
        return {"host": host, **self.one(0, "host", {"address": host})}

    def address(self, rank: int) -> str:
        return self._nodes[rank].address

    def name(self, rank: int) -> str:
        return f"{super().name(rank)} on Ray node {self.address(rank)}"

    def close(self) -> None:
        super().close()
        self._release()

    def _release(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)

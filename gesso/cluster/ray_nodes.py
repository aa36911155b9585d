"""The connection to a Ray cluster, and its nodes. Ray is imported only with `cluster.address`."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gesso.types import UserError

REACHABLE = 10.0
"""Seconds in which a given address must accept a connection; Ray itself tries for minutes."""
REFUSES = 1.0
"""Seconds to wait for an answer of a node that may have ended."""


@dataclass(frozen=True)
class Node:
    address: str
    port: int
    cpus: int
    gpus: int

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Node:
        """As Ray describes it."""
        return cls(
            described["NodeManagerAddress"],
            described["NodeManagerPort"],
            int(described["Resources"].get("CPU", 0)),
            int(described["Resources"].get("GPU", 0)),
        )

    def reachable(self) -> bool:
        """Whether the node can be reached: Ray notices a lost machine only after some time."""
        try:
            socket.create_connection((self.address, self.port), REACHABLE).close()
        except OSError:
            return False
        return True

    def refuses(self) -> bool:
        """Whether its Ray processes have ended. An interrupted network does not refuse."""
        try:
            socket.create_connection((self.address, self.port), REFUSES).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False


def connect(address: str) -> Any:
    """The module `ray`, connected. Raises a UserError if there is no cluster."""
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "cluster.address requires Ray, which is not installed; run `pip install 'gesso[ray]'`"
        ) from error
    if ray.is_initialized():
        return ray
    where = f'there is no Ray cluster at cluster.address = "{address}"'
    remedy = "start one with `ray start --head`, or remove cluster.address"
    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), REACHABLE).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{where} ({reason.rstrip('.')}); {remedy}") from error
    return ray


def nodes(address: str) -> list[Node]:
    """The nodes that are alive."""
    return [Node.of(described) for described in connect(address).nodes() if described["Alive"]]


def most_threads(nodes: Sequence[Node], workers: int) -> int:
    """The most threads of a worker with which all workers fit on the nodes; 1 if they never do."""
    most = max((node.cpus for node in nodes), default=1)
    fitting = (n for n in range(most, 1, -1) if sum(node.cpus // n for node in nodes) >= workers)
    return next(fitting, 1)

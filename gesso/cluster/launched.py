"""Workers in processes that torchrun has started.

    torchrun --nproc-per-node 8 -m -- gesso train …

Rank 0 is the driver and starts a worker for itself. The other processes are workers: they find the
address of the driver in torchrun's store, and open two connections to it.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from gesso.cluster.channel import GRACE, Channel, Messages, end_with_the_driver
from gesso.types import StopRun, UserError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

VISIBLE = "CUDA_VISIBLE_DEVICES"
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOOPBACK = "127.0.0.1"
KEY = "gesso/driver"
HELLO = 10.0
"""Seconds in which a connection must say who it is."""
WAITING = timedelta(hours=1)
"""For the driver, which reads prompts and checks rewards before it needs workers."""
CONNECTIONS = ("messages", "life")


@dataclass(frozen=True)
class Launch:
    """The place of this process among those that torchrun started."""

    rank: int
    count: int

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> Launch | None:
        """None without torchrun, or if it started only one process."""
        if any(name not in environment for name in VARIABLES):
            return None
        rank, count, _, local_count = (int(environment[name]) for name in VARIABLES[:4])
        if count == 1:
            return None
        if local_count != count:
            raise UserError(
                f"torchrun started {count} processes on several machines, {local_count} of them on "
                "this one; with torchrun only one machine is supported: use cluster.address (Ray) "
                "for several"
            )
        return cls(rank, count)

    def gpus(self, visible: tuple[str, ...]) -> tuple[str, ...]:
        """Of all ranks. A scheduler may have given each process a GPU of its own."""
        return visible * self.count if len(visible) == 1 else visible


def _store(rank: int) -> TCPStore:
    from torch.distributed import TCPStore

    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = rank == 0 and not agent
    return TCPStore(address, port, is_master=hosts, timeout=WAITING, wait_for_workers=False)


# The driver


def accept(launch: Launch, patience: float) -> Iterator[tuple[Channel, socket.socket]]:
    """The connections of rank 1, 2, …, as soon as all have connected."""
    token = secrets.token_hex()
    found: dict[tuple[int, str], tuple[Channel, socket.socket]] = {}
    with socket.create_server((LOOPBACK, 0), backlog=2 * launch.count) as listener:
        store = _store(launch.rank)
        store.set(KEY, json.dumps([*listener.getsockname(), token]))
        deadline = time.monotonic() + patience
        while len(found) < len(CONNECTIONS) * (launch.count - 1):
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                connected = {rank for rank, kind in found if kind == CONNECTIONS[-1]}
                absent = [rank for rank in range(1, launch.count) if rank not in connected]
                raise StopRun(
                    f"torchrun's processes of ranks {absent} did not connect within "
                    f"cluster.patience = {patience:g} s; read their output, or raise "
                    "cluster.patience"
                ) from None
            connection.settimeout(HELLO)
            channel = Channel(connection)
            try:
                hello, _ = channel.receive()
                known = hmac.compare_digest(hello["token"], token)
            except Exception:  # not one of our workers: anything may have come
                known = False
            if not known:
                connection.close()
                continue
            found[hello["rank"], hello["connection"]] = channel, connection
            connection.settimeout(None)
    for rank in range(1, launch.count):
        yield found[rank, "messages"][0], found[rank, "life"][1]


# A worker


def join(launch: Launch) -> Channel:
    """Makes this process a worker, which ends with the driver. Returns its connection."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while it waits for the driver
    _select_gpu(int(os.environ["LOCAL_RANK"]))
    host, port, token = json.loads(_store(launch.rank).get(KEY))
    for number in (signal.SIGINT, signal.SIGTERM):  # torchrun signals the driver, too
        signal.signal(number, signal.SIG_IGN)
    connections = {name: socket.create_connection((host, port)) for name in CONNECTIONS}
    channels = {name: Channel(connection) for name, connection in connections.items()}
    for name, channel in channels.items():
        channel.send({"token": token, "rank": launch.rank, "connection": name})
    end_with_the_driver(connections["life"], GRACE)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    forward_output(channels["messages"])
    return channels["messages"]


def _select_gpu(local_rank: int) -> None:
    """Like a worker that the driver starts, this process sees one GPU only. CUDA reads the variable
    when it is initialized, even to count GPUs."""
    visible = os.environ.get(VISIBLE, str(local_rank)).split(",")
    os.environ[VISIBLE] = visible[local_rank % len(visible)].strip()


def forward_output(channel: Messages) -> None:
    """The driver shows what this process prints, with its rank."""
    reading, writing = os.pipe()
    for stream in (1, 2):
        os.dup2(writing, stream)

    def forward() -> None:
        with open(reading, errors="replace") as lines:
            for line in lines:
                with contextlib.suppress(OSError):
                    channel.send({"line": line})

    threading.Thread(target=forward, daemon=True).start()

"""Real Ray nodes on this machine, each with an address of its own on loopback."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.waiting import Started

STARTED = "Ray runtime started"
HEAD, OTHER = "127.0.0.2", "127.0.0.3"  # not 127.0.0.1, which Ray replaces
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
SIZES = ["--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats"]


class RayNode:
    """All processes of one node: `ray start --block` and its children."""

    def __init__(self, address: str, *options: str, through: Sequence[str] = ()) -> None:
        ray = Path(sys.executable).with_name("ray")
        command = [*through, str(ray), "start", "--block", *SIZES, f"--node-ip-address={address}"]
        # As on another machine, a node knows nothing of this checkout but what is installed.
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self.started = Started([*command, *options], env=env | ENVIRONMENT, start_new_session=True)
        self.started.until(lambda: STARTED in self.started.output())

    def kill(self) -> None:
        """As when the machine loses its power."""
        os.killpg(self.started.process.pid, signal.SIGKILL)
        self.started.process.wait()


class RayCluster:
    def __init__(self, folder: Path) -> None:
        """`folder`: short, for sockets."""
        with socket.create_server((HEAD, 0)) as free:
            self.address = f"{HEAD}:{free.getsockname()[1]}"
        port = self.address.rpartition(":")[2]
        options = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"]
        self.nodes = [RayNode(HEAD, *options)]

    def add(self, address: str = OTHER, through: Sequence[str] = ()) -> RayNode:
        self.nodes.append(RayNode(address, f"--address={self.address}", through=through))
        return self.nodes[-1]

    def close(self) -> None:
        for node in self.nodes:
            if node.started.process.poll() is None:
                node.kill()

"""Real Ray nodes on this machine, each with an address of its own on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import Started

STARTED = "Ray runtime started"
STARTS = 6
HEAD, OTHER = "127.0.0.2", "127.0.0.3"  # not 127.0.0.1, which Ray replaces
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5f1c" * 16}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"} | TOKEN
PORTS = ["metrics-export", "dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent"]
"""Of Ray's agents. If they choose a port themselves, Ray waits 15 s for it and no longer, which is
not enough on a busy machine (ray-project/ray, issue 65983)."""
ESTABLISHED = "01"  # in /proc/net/tcp
SIZES = ["--object-store-memory=100000000", "--disable-usage-stats"]


class RayNode:
    """All processes of one node: `ray start --block` and its children."""

    def __init__(
        self, address: str, *options: str, through: Sequence[str] = (), cpus: int = 1
    ) -> None:
        self.address = address
        ray = Path(sys.executable).with_name("ray")
        command = [*through, str(ray), "start", "--block", *SIZES, f"--num-cpus={cpus}"]
        command.append(f"--node-ip-address={address}")
        command += [f"--{name}-port={port}" for name, port in zip(PORTS, free_ports(), strict=True)]
        # As on another machine, a node knows nothing of this checkout but what is installed.
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self._start([*command, *options], env | ENVIRONMENT, STARTS)

    def _start(self, command: Sequence[str], env: Mapping[str, str], times: int) -> None:
        """Again if a port is no longer free."""
        self.started = Started(command, env=env, start_new_session=True)
        try:
            self.started.until(lambda: STARTED in self.started.output())
        except AssertionError:
            self.kill()
            if times == 1:
                raise
            self._start(command, env, times - 1)

    def kill(self) -> None:
        """As when the machine loses its power."""
        for pid in session(self.started.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.started.process.wait()


def free_ports() -> list[int]:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("", 0))) for _ in PORTS]
        return [server.getsockname()[1] for server in servers]


def session(leader: int) -> list[int]:
    """Its processes, also those whose parent has ended."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            if int(file.read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(file.parent.name))
    return found


class RayCluster:
    def __init__(self, folder: Path, head: str = HEAD) -> None:
        """`folder`: short, for sockets."""
        with socket.create_server((head, 0)) as free:
            self.address = f"{head}:{free.getsockname()[1]}"
        port = self.address.rpartition(":")[2]
        options = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"]
        self.nodes = [RayNode(head, *options)]

    def add(self, address: str = OTHER, through: Sequence[str] = (), cpus: int = 1) -> RayNode:
        self.nodes.append(RayNode(address, f"--address={self.address}", through=through, cpus=cpus))
        return self.nodes[-1]

    @property
    def alive(self) -> list[RayNode]:
        return [node for node in self.nodes if node.started.process.poll() is None]

    def close(self) -> None:
        for node in self.alive:
            node.kill()


@dataclass(frozen=True)
class Cable:
    """The network between this machine and a namespace that stands for another one."""

    here: str = "10.213.0.1"
    there: str = "10.213.0.2"
    namespace: str = "gesso-test"

    @property
    def through(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace]

    def set(self, state: str) -> None:
        _ip("-n", self.namespace, "link", "set", "eth0", state)

    @property
    def recovered(self) -> bool:
        """Whether everything that was sent has arrived. TCP sends it again after some time, which
        doubles: a connection that is cut off again before that is silent for much longer than the
        network is down, and Ray gives it up after 20 s."""
        ends = ((self.here, ()), (self.there, self.through))
        return not any(_on_its_way(address, _connections(through)) for address, through in ends)


@contextmanager
def cable() -> Iterator[Cable]:
    """Raises a CalledProcessError where it is not allowed."""
    made = Cable()
    _ip("netns", "add", made.namespace)
    try:
        _ip("link", "add", "gesso0", "type", "veth", "peer", "eth0", "netns", made.namespace)
        _ip("addr", "add", f"{made.here}/24", "dev", "gesso0")
        _ip("link", "set", "gesso0", "up")
        _ip("-n", made.namespace, "addr", "add", f"{made.there}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", made.namespace, "link", "set", device, "up")
        yield made
    finally:
        _ip("netns", "delete", made.namespace)


def hexadecimal(address: str) -> str:
    """An IPv4 address as in /proc/net/tcp."""
    return bytes(map(int, address.split(".")))[::-1].hex().upper()


def _connections(through: Sequence[str]) -> str:
    command = [*through, "sh", "-c", "cat /proc/net/tcp*"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _on_its_way(address: str, connections: str) -> bool:
    """Whether TCP waits for an acknowledgement of something sent from this address, on a connection
    that neither end has closed."""
    rows = [line.split() for line in connections.splitlines()]
    own = [row for row in rows if row[1].partition(":")[0].endswith(hexadecimal(address))]
    return any(int(row[4].partition(":")[0], 16) for row in own if row[3] == ESTABLISHED)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)

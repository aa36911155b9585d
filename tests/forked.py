"""Processes that have imported what a run needs already: they are forked from one that does nothing
else, for the imports take longer than the runs of these tests."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests import loaded_once

NEEDED = [
    "gesso.run", "gesso.models.flow.sd3", "gesso.algorithms.flow_grpo", "gesso.viewer.report",
    "gesso.algorithms.diffusion_nft", "peft", "tests.forked",
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "gesso.worker", "torch.distributed.checkpoint", "transformers.models.qwen2.modeling_qwen2",
    "gesso.models.tokens.causal", "gesso.models.flow.flux", "gesso.models.flow.qwen_image",
]  # fmt: skip


def started(
    target: Callable[..., object], *arguments: object, daemon: bool = True
) -> ForkServerProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(NEEDED)
    process = context.Process(target=target, args=arguments, daemon=daemon)
    process.start()
    return process


def serve_from_here(*closed: connection.Connection) -> None:
    """Later processes are forked from a copy of this process as it is now, instead of from a new
    one that imports everything again. Call it before there are threads. The copy closes these
    connections."""
    server: Any = forkserver._forkserver
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    alive, ours = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        pid = os.fork()
        if not pid:
            os.close(ours)
            for each in closed:
                each.close()
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not those of pytest
            try:
                forkserver.main(listener.fileno(), alive, [])
            finally:
                os._exit(0)
    os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd = address, ours
    server._forkserver_pid = pid


@contextmanager
def gesso(*arguments: str | Path, output: Path, forks: bool = False) -> Iterator[ForkServerProcess]:
    """`gesso …`; what it prints goes to a file. It ends with the block at the latest. Its worker
    processes may be forked too."""
    process = started(_main, [*map(str, arguments)], output, forks, daemon=not forks)
    try:
        yield process
    finally:
        process.kill()
        process.join()


class Gesso:
    """`gesso …` in this folder, with this environment, as `subprocess.Popen` would start it: the
    first process of a new session, its output appended to the file. May be used in threads."""

    _lock = threading.Lock()  # multiprocessing reads an exit status only once, without a lock

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, output: Path
    ) -> None:
        with self._lock:
            self._process = started(
                _gesso, [*arguments], dict(environment), folder, output, daemon=False
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        with self._lock:
            return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        connection.wait([self._process.sentinel], seconds)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("gesso", seconds or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.pid is not None and self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def pytest(*arguments: str | Path, output: Path) -> tuple[int | None, str]:
    """The exit status of pytest and what it prints."""
    process = started(_pytest, [*map(str, arguments)], output, daemon=False)  # it starts others
    process.join()
    return process.exitcode, output.read_text()


def worker() -> tuple[socket.socket, socket.socket, int]:
    """A worker process of a cluster: its connections for messages, and to end with this process,
    and its id."""
    ours, theirs = socket.socketpair()
    life, watched = socket.socketpair()
    with theirs, watched:
        process = started(_worker, theirs, watched)
    assert process.pid is not None
    return ours, life, process.pid


def _worker(messages: socket.socket, life: socket.socket) -> None:
    import torch

    from gesso.cluster.channel import Channel, end_with_the_driver
    from gesso.worker import serve

    loaded_once.use()  # a pool's workers load the same model for many runs
    torch.set_num_threads(1)
    end_with_the_driver(life)
    serve(Channel(messages))


def _main(arguments: list[str], output: Path, forks: bool) -> None:
    from gesso import cli
    from gesso.cluster.processes import Processes
    from tests.cluster.pools import Forked

    _print_to(output)
    if forks:
        serve_from_here()
        Processes._start = Forked._start  # type: ignore[method-assign, assignment]
    sys.exit(cli.main(arguments))


def _gesso(arguments: list[str], environment: dict[str, str], folder: Path, output: Path) -> None:
    from gesso import cli

    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    _apply(environment)
    os.chdir(folder)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    _print_to(output, "ab")
    sys.exit(cli.main(arguments))


def _apply(environment: Mapping[str, str]) -> None:
    """Variables that were read when the modules were imported."""
    import torch

    config: Any = sys.modules.get("torch._inductor.config")
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    processes = environment.get("TORCHINDUCTOR_COMPILE_THREADS")
    if config is not None and processes:
        config.compile_threads = int(processes)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))


def _pytest(arguments: list[str], output: Path) -> None:
    import pytest

    _print_to(output)
    sys.exit(pytest.main(arguments))


def _print_to(output: Path, mode: str = "wb") -> None:
    with output.open(mode) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)

"""Processes that have imported what a run needs already: they are forked from one that does nothing
else, for the imports take longer than the runs of these tests."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path

NEEDED = [
    "gesso.run", "gesso.models.flow.sd3", "gesso.algorithms.flow_grpo", "gesso.viewer.report",
    "gesso.algorithms.diffusion_nft", "peft", "tests.forked",
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "gesso.worker", "torch.distributed.checkpoint", "transformers.models.qwen2.modeling_qwen2",
]  # fmt: skip


def _started(target: Callable[..., object], *arguments: object) -> ForkServerProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(NEEDED)
    process = context.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


@contextmanager
def gesso(*arguments: str | Path, output: Path) -> Iterator[ForkServerProcess]:
    """`gesso …`; what it prints goes to a file. It ends with the block at the latest."""
    process = _started(_main, [*map(str, arguments)], output)
    try:
        yield process
    finally:
        process.kill()
        process.join()


def worker() -> tuple[socket.socket, socket.socket, int]:
    """A worker process of a cluster: its connections for messages, and to end with this process,
    and its id."""
    ours, theirs = socket.socketpair()
    life, watched = socket.socketpair()
    with theirs, watched:
        process = _started(_worker, theirs, watched)
    assert process.pid is not None
    return ours, life, process.pid


def _worker(connection: socket.socket, life: socket.socket) -> None:
    import torch

    from gesso.cluster.channel import Channel, end_with_the_driver
    from gesso.worker import serve

    torch.set_num_threads(1)
    end_with_the_driver(life)
    serve(Channel(connection))


def _main(arguments: list[str], output: Path) -> None:
    from gesso import cli

    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(cli.main(arguments))

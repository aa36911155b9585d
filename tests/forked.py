"""`gesso …` in a process of its own that has imported what a run needs already: it is forked from
one that does nothing else, for the imports take longer than the runs of these tests."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path

NEEDED = [
    "gesso.run", "gesso.models.flow.sd3", "gesso.algorithms.flow_grpo", "gesso.viewer.report",
    "gesso.algorithms.diffusion_nft", "peft", "tests.forked",
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
]  # fmt: skip


@contextmanager
def gesso(*arguments: str | Path, output: Path) -> Iterator[ForkServerProcess]:
    """What it prints goes to a file. It ends with the block at the latest."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(NEEDED)
    process = context.Process(target=_main, args=([*map(str, arguments)], output))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _main(arguments: list[str], output: Path) -> None:
    from gesso import cli

    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(cli.main(arguments))

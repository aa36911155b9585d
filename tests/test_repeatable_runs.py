"""On a CUDA device the same recipe gives the same run, bit by bit, in every process: with an empty
compile cache, with a filled one, and after a SIGKILL. Sequences are longer than a block of the
attention kernels, whose order of summation matters only then."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from tests import forked
from tests.background import Background
from tests.gpu_runs import KINDS, STEPS, kill, recipe, result, started, trained, write_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("repeatable"),  # with --dist loadgroup: one process makes the runs
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def kill_after(process: forked.Gesso, run: Path, rows: int, seconds: float) -> None:
    """SIGKILL, a moment after that many rows are written."""
    metrics = run / "metrics.jsonl" if rows else run / "config.toml"
    deadline = time.monotonic() + 300
    while not metrics.exists() or len(metrics.read_text().splitlines()) < rows:
        assert process.poll() is None and time.monotonic() < deadline, "it ended too early"
        time.sleep(0.01)
    time.sleep(seconds)
    kill(process)
    process.wait()


MOMENTS = [(0, 5.0), (1, 0.0), (2, 0.3), (3, 0.05), (4, 0.0)]
"""Rows written, and seconds since then: before the first row, and within steps."""


@dataclass(frozen=True)
class Runs:
    """Of a model: two runs, each process with an empty cache; and with the cache that the first
    has filled, runs that are killed and resumed, by their moments."""

    first: Future[Path]
    other: Future[Path]
    killed: dict[int, Future[Path]]


def start_runs(background: Background, base: Path) -> dict[str, Runs]:
    """Killed are SD3 at five moments, the others at one."""
    prompts = write_prompts(base)
    made = {}
    for name in KINDS:
        folder = base / name
        folder.mkdir()
        file, cache = recipe(name, folder, prompts), folder / "cache-a"
        first = background.start(partial(trained, folder / "a", file, cache), early=True)
        other = background.start(partial(trained, folder / "b", file, folder / "cache-b"))
        killed = {
            i: background.start(
                partial(killed_and_resumed, folder / f"killed-{i}", file, cache, i),
                early=True,
                after=first,
            )
            for i in (range(5) if name == "sd35" else [2])
        }
        made[name] = Runs(first, other, killed)
    return made


def killed_and_resumed(run: Path, recipe: Path, cache: Path, moment: int) -> Path:
    kill_after(started(run, recipe, cache), run, *MOMENTS[moment])
    return trained(run, recipe, cache)


@pytest.mark.parametrize("name", KINDS)
def test_two_processes_with_empty_caches(name: str, shared_runs: dict[str, Runs]) -> None:
    (rows, weights), other = result(shared_runs[name].first), result(shared_runs[name].other)
    assert len(rows) == STEPS + 1 and weights
    assert (rows, weights) == other


@pytest.mark.parametrize("name", KINDS)
def test_killed_and_resumed(name: str, shared_runs: dict[str, Runs]) -> None:
    expected = result(shared_runs[name].first)
    for moment, run in shared_runs[name].killed.items():
        assert result(run) == expected, f"killed at {MOMENTS[moment]}"

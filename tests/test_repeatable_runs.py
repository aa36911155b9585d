"""On a CUDA device the same recipe gives the same run, bit by bit, in every process: with an empty
compile cache, with a filled one, and after a SIGKILL. Sequences are longer than a block of the
attention kernels, whose order of summation matters only then."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.gpu_runs import KINDS, STEPS, at_once, recipe, result, started, trained, write_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("repeatable"),  # with --dist loadgroup: one process makes the runs
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def kill_after(process: subprocess.Popen[bytes], run: Path, rows: int, seconds: float) -> None:
    """SIGKILL, a moment after that many rows are written."""
    metrics = run / "metrics.jsonl" if rows else run / "config.toml"
    deadline = time.monotonic() + 300
    while not metrics.exists() or len(metrics.read_text().splitlines()) < rows:
        assert process.poll() is None and time.monotonic() < deadline, "it ended too early"
        time.sleep(0.01)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def first_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every model twice, each process with an empty cache."""
    base = tmp_path_factory.mktemp("runs")
    prompts = write_prompts(base)
    folders: dict[str, Path] = {}
    jobs = []
    for name in KINDS:
        folders[name] = base / name
        folders[name].mkdir()
        file = recipe(name, folders[name], prompts)
        for run in ("a", "b"):
            jobs.append(partial(trained, folders[name] / run, file, folders[name] / f"cache-{run}"))
    at_once(jobs)
    return folders


@pytest.mark.parametrize("name", KINDS)
def test_two_processes_with_empty_caches(name: str, first_runs: dict[str, Path]) -> None:
    (rows, weights), other = (result(first_runs[name] / run) for run in ("a", "b"))
    assert len(rows) == STEPS + 1 and weights
    assert (rows, weights) == other


MOMENTS = [(0, 5.0), (1, 0.0), (2, 0.3), (3, 0.05), (4, 0.0)]
"""Rows written, and seconds since then: before the first row, and within steps."""


@pytest.fixture(scope="module")
def killed_runs(first_runs: dict[str, Path]) -> dict[tuple[str, int], Path]:
    """With a filled cache, killed and resumed; SD3 at five moments, the others at one."""

    def killed(run: Path, moment: int) -> None:
        rest = run.parent / "recipe.toml", run.parent / "cache-a"
        kill_after(started(run, *rest), run, *MOMENTS[moment])
        trained(run, *rest)

    cases = [("sd35", i) for i in range(5)] + [(name, 2) for name in KINDS if name != "sd35"]
    made = {(name, i): first_runs[name] / f"killed-{i}" for name, i in cases}
    at_once(partial(killed, run, moment) for (_, moment), run in made.items())
    return made


@pytest.mark.parametrize("name", KINDS)
def test_killed_and_resumed(
    name: str, first_runs: dict[str, Path], killed_runs: dict[tuple[str, int], Path]
) -> None:
    expected = result(first_runs[name] / "a")
    for (kind, moment), run in killed_runs.items():
        if kind == name:
            assert result(run) == expected, f"killed at {MOMENTS[moment]}"

"""The GPU tests several times in one process, and the runs that go on meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from tests.background import Background

FEW = """
import os, threading, pytest, torch
torch.cuda.is_available = lambda: True
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("runs")]
made, began = [], threading.Event()

def start_runs(background, base):
    made.append(base)
    return background.start(began.set), background.start(lambda: 1 / (3 - len(made)))

def test_before_others():
    assert False, "other tests come first"

def test_folders_are_new(shared_runs, tmp_path):
    assert made[-1].parent == tmp_path.parent and len({*made}) == len(made)

def test_the_last_pass_fails(shared_runs):
    assert shared_runs[1].result() > 0
"""
OTHER = """
import pytest, test_a_few

@pytest.mark.gpu
def test_runs_go_on_meanwhile():
    assert test_a_few.began.wait(60)
"""


def test_passes_in_one_process(tmp_path: Path) -> None:
    """Each with new runs. A failure of a run is one of the test that waits for it."""
    (tmp_path / "test_a_few.py").write_text(FEW)
    (tmp_path / "test_b_other.py").write_text(OTHER)
    options = ["--passes=3", f"--rootdir={tmp_path}", "-c", "/dev/null", "-p", "tests.conftest"]
    options += ["-k", "not before_others", "--tb=line", str(tmp_path)]
    found = subprocess.run(
        [sys.executable, "-m", "tests.gpu_suite", *options], capture_output=True, text=True
    )
    assert found.returncode == 1, found.stdout
    ends = [line.split(", ")[:3] for line in found.stdout.splitlines()[-3:]]
    good, bad = (["3 passed", "0 failed", "0 skipped"], ["2 passed", "1 failed", "0 skipped"])
    assert ends == [
        [f"pass {i}: {counts[0]}", *counts[1:]] for i, counts in enumerate([good, good, bad], 1)
    ]
    assert "ZeroDivisionError" in found.stdout
    assert found.stdout.index("runs_go_on") < found.stdout.index("the_last_pass")


def test_jobs_begin_in_order() -> None:
    """At most `at_once`; early ones first, and one after another that failed fails."""
    background, order = Background(1, lambda: None), []
    begun, free = threading.Event(), threading.Event()

    def held() -> None:
        begun.set()
        free.wait(60)

    first = background.start(held)
    begun.wait(60)
    late = background.start(lambda: order.append("late"))
    then = background.start(lambda: order.append("then"), early=True, after=first)
    early = background.start(lambda: order.append("early"), early=True)
    free.set()
    for job in (late, then, early):
        job.result(60)
    assert order == ["then", "early", "late"]
    failed = background.start(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        background.start(lambda: order.append("never"), after=failed).result(60)
    assert len(order) == 3


def test_stopping_leaves_nothing_running() -> None:
    started: list[subprocess.Popen] = []

    def kill() -> None:
        for process in [*started]:
            process.kill()

    def two() -> None:
        for _ in range(2):
            started.append(subprocess.Popen(["sleep", "600"]))
            running.set()
            started[-1].wait()

    background, running = Background(1, kill), threading.Event()
    going, never = background.start(two), background.start(two)
    after = background.start(two, after=going)
    last = background.start(two, after=after)
    running.wait(60)
    background.stop()
    assert going.done() and len(started) == 2 and all(p.returncode == -9 for p in started)
    for job in (never, after, last, background.start(two)):
        with pytest.raises(CancelledError):
            job.result(60)

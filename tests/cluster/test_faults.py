"""Runs that lose workers, samplers or time end like undisturbed ones: `make test-faults`.

`test_outer_faults.py` has the driver, disks and reward servers; `test_ray.py` whole nodes, their
network and their disks; `test_workers.py` kills workers at five moments in `make test`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

import pytest

from gesso.cluster import separate, workers
from gesso.cluster.processes import Processes
from gesso.track.run_folder import RunFolder
from tests.cluster.moments import MOMENTS, at_moments
from tests.cluster.runs import assert_equal, go, language_recipe

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not os.environ.get("GESSO_FAULTS"), reason="make test-faults runs them"),
]

STALL = 10.0  # seconds


def test_a_worker_that_is_cut_off_for_ten_seconds(
    alone: RunFolder, language: Path, tmp_path: Path, pids: dict[int, int]
) -> None:
    """As by a network that stalls, at every moment: the run waits for it, nothing is repeated."""
    timers = []

    def stall(moment: str) -> None:
        os.kill(pids[1], SIGSTOP)
        timers.append(threading.Timer(STALL, os.kill, (pids[1], SIGCONT)))
        timers[-1].start()

    data = language_recipe(language, {"name": "grpo"})
    with pytest.MonkeyPatch.context() as patched:
        left = at_moments(patched, MOMENTS, stall)
        disturbed = go(data, tmp_path / "run", 2)
    assert not left and all(timer.finished.is_set() for timer in timers)
    assert "starting new workers" not in (disturbed.path / "log.txt").read_text()
    assert_equal(alone, disturbed)


def test_a_worker_that_never_answers_is_replaced(
    alone: RunFolder, language: Path, tmp_path: Path, pids: dict[int, int]
) -> None:
    data, stopped = language_recipe(language, {"name": "grpo"}), []

    def stop(moment: str) -> None:
        os.kill(pids[1], SIGSTOP)
        stopped.append(pids[1])

    with pytest.MonkeyPatch.context() as patched:
        at_moments(patched, ["update"], stop)
        disturbed = go(data, tmp_path / "run", 2, patience=20, restarts=1)
    os.kill(stopped[0], SIGKILL)  # one of another machine ends when it finds the driver gone
    assert_equal(alone, disturbed)
    log = (disturbed.path / "log.txt").read_text()
    assert "worker 1 has not answered for cluster.patience = 20 s while " in log
    assert "new workers started in" in log


@pytest.mark.parametrize("node", [[1], [1, 2]], ids=["worker", "node"])
def test_the_end_of_workers_is_noticed_within_two_seconds_and_made_good_within_thirty(
    alone: RunFolder,
    language: Path,
    tmp_path: Path,
    pids: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
    node: list[int],
) -> None:
    """Of a worker that trains, or of all workers of a node, at every moment."""
    killed, noticed, replaced = [], [], []

    def kill(moment: str) -> None:
        killed.append(time.monotonic())
        for rank in node:
            os.kill(pids[rank], SIGKILL)

    honest = workers.Workers.restart

    def restart(self: workers.Workers) -> None:
        noticed.append(time.monotonic())
        honest(self)
        replaced.append(time.monotonic())

    monkeypatch.setattr(workers.Workers, "restart", restart)
    # Scores arrive at once: without a condition, "update" would follow before the loss is noticed.
    left = at_moments(monkeypatch, MOMENTS, kill, when=lambda: len(replaced) == len(killed))
    data, restarts = language_recipe(language, {"name": "grpo"}), len(MOMENTS)
    disturbed = go(data, tmp_path / "run", 1 + len(node), restarts=restarts)
    assert not left
    for times, most in ((noticed, 2), (replaced, 30)):
        seconds = [time - moment for time, moment in zip(times, killed, strict=True)]
        assert max(seconds) < most, seconds
    assert_equal(alone, disturbed)
    log = (disturbed.path / "log.txt").read_text()
    assert log.count("new workers started in") == restarts
    assert log.count("repeat 0 steps of 0.0 s") == restarts - 1, "at a save its step is repeated"


@pytest.mark.parametrize("ahead", [{"lag": 1, "steps": 4}, {"lag": 2, "steps": 6, "partial": True}])
def test_samplers_apart_that_are_killed(
    language: Path,
    tmp_path: Path,
    pids: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
    ahead: dict[str, Any],
) -> None:
    """Batches are always ahead. The run goes on with the samplers that are left; it restarts for
    the last one, which is lost while it receives weights. At "save" the traces of the next batch
    are lost, whose weights the other samplers no longer have."""
    data = language_recipe(language, {"name": "grpo"}) | ahead
    alone = go(data, tmp_path / "alone")
    # task, worker that gets it, sampler that is killed; "open" is of an evaluation
    moments = [("take", 0, 1), ("sample", 2, 2), ("accept", 3, 3), ("open", 1, 1), ("save", 0, 2)]
    killed: dict[str, float] = {}
    times: dict[str, list[float]] = {"lost": [], "restart": [], "train": []}
    honest = Processes.send

    def send(self: Processes, rank: int, task: str, content: Any, *data: bytes) -> None:
        honest(self, rank, task, content, *data)
        if moments and (task, rank) == moments[0][:2]:
            killed[task] = time.monotonic()
            os.kill(pids[moments.pop(0)[2]], SIGKILL)

    def timed(name: str) -> None:
        original = getattr(separate.SeparateSamplers, name)

        def call(self: Any, *arguments: Any) -> Any:
            times[name].append(time.monotonic())
            return original(self, *arguments)

        monkeypatch.setattr(separate.SeparateSamplers, name, call)

    monkeypatch.setattr(Processes, "send", send)
    for name in times:
        timed(name)
    disturbed = go(data, tmp_path / "run", 1, samplers=3, restarts=1)
    assert not moments
    assert_equal(alone, disturbed)
    for task, moment in killed.items():
        noticed = min(t for t in times["lost"] + times["restart"] if t > moment)
        recovered = min(t for t in times["train"] if t > noticed)
        assert noticed - moment < 2 and recovered - moment < 30, (task, moment, times)
    log = (disturbed.path / "log.txt").read_text()
    assert log.count("new workers started in") == 1
    assert log.count("it was a sampler, and") == 4
    assert log.count("samples of lost samplers were sampled again in") >= 2


@contextmanager
def slowed(pid: int) -> Iterator[None]:
    """It runs in a twentieth of the time: on a busy machine the others do not have a core each."""
    done = threading.Event()

    def slow() -> None:
        with suppress(ProcessLookupError):  # it has ended
            while not done.is_set():
                os.kill(pid, SIGSTOP)
                time.sleep(0.095)
                os.kill(pid, SIGCONT)
                time.sleep(0.005)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


SLOWED = {"steps": 6, "sampler": {"batch": 1}, "eval": {"every": 0, "prompts": 3}}


@pytest.fixture(scope="module")
def unhurried(language: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    data = language_recipe(language, {"name": "grpo", "max_tokens": 32}) | SLOWED
    return go(data, tmp_path_factory.mktemp("unhurried") / "run")


@pytest.mark.parametrize("moment", ["evaluate", "sample", "share", "update", "save"])
def test_a_worker_that_is_ten_times_slower_gets_less_work_and_a_warning(
    unhurried: RunFolder, language: Path, tmp_path: Path, pids: dict[int, int], moment: str
) -> None:
    """From this moment on."""
    data = language_recipe(language, {"name": "grpo", "max_tokens": 32}) | SLOWED
    made, dealt, slowing = [0, 0], [], ExitStack()
    send = Processes.send

    def counted(self: Processes, rank: int, task: str, content: Any, *rest: bytes) -> None:
        made[rank] += task == "sample"
        if task == "update":
            dealt.append(content["slowness"])
        send(self, rank, task, content, *rest)

    def slow(moment: str) -> None:
        slowing.enter_context(slowed(pids[1]))

    with pytest.MonkeyPatch.context() as patched, slowing:
        patched.setattr(Processes, "send", counted)
        left = at_moments(patched, [moment], slow)
        disturbed = go(data, tmp_path / "run", 2)
    assert not left
    assert made[1] < made[0] / 2
    assert dealt[-1][0] == 1.0 and dealt[-1][1] > 3
    assert "warning (slow-worker): worker 1 took" in (disturbed.path / "log.txt").read_text()
    assert_equal(unhurried, disturbed)

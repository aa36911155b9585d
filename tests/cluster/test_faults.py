"""Runs that lose time, a disk or their driver end like undisturbed ones: `make test-faults`.

`test_workers.py` kills workers at five moments, `test_ray.py` workers, nodes and their network,
`tests/rewards/test_faults.py` reward processes and servers.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

import pytest
import tomli_w

from gesso import run
from gesso.cluster import separate, workers
from gesso.cluster.channel import Channel
from gesso.cluster.processes import Processes, Worker
from gesso.track.run_folder import RunFolder
from gesso.types import StopRun
from tests import forked
from tests.cluster.runs import assert_equal, go, language_recipe
from tests.waiting import until

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not os.environ.get("GESSO_FAULTS"), reason="make test-faults runs them"),
]

STALL = 10.0  # seconds


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Rank → process of the newest workers. They are forked: imports take most of a start."""
    found: dict[int, int] = {}

    def start(self: Processes, rank: int, environment: Mapping[str, str]) -> Worker:
        connection, life, found[rank] = forked.worker()
        return Worker(rank, Channel(connection), life)

    monkeypatch.setattr(Processes, "_start", start)
    return found


@pytest.fixture(scope="module")
def alone(language: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return go(language_recipe(language, {"name": "grpo"}), tmp_path_factory.mktemp("alone") / "run")


def at_first(
    patched: pytest.MonkeyPatch, tasks: list[str], happens: Callable[[str], object]
) -> None:
    """When the second worker gets the first of these tasks, then when it gets the next one, …"""
    honest = Processes.send

    def send(self: Processes, rank: int, task: str, content: Any, *data: bytes) -> None:
        honest(self, rank, task, content, *data)
        if rank == 1 and [task] == tasks[:1]:
            tasks.pop(0)
            happens(task)

    patched.setattr(Processes, "send", send)


@pytest.mark.parametrize("task", ["open", "sample", "share", "update", "publish"])
def test_a_worker_that_is_cut_off_for_ten_seconds(
    alone: RunFolder, language: Path, tmp_path: Path, pids: dict[int, int], task: str
) -> None:
    """As by a network that stalls: the run waits for it, and nothing is repeated."""

    timers = []

    def stall(task: str) -> None:
        os.kill(pids[1], SIGSTOP)
        timers.append(threading.Timer(STALL, os.kill, (pids[1], SIGCONT)))
        timers[0].start()

    data = language_recipe(language, {"name": "grpo"})
    with pytest.MonkeyPatch.context() as patched:
        at_first(patched, [task], stall)
        disturbed = go(data, tmp_path / "run", 2)
    assert timers[0].finished.is_set()
    assert_equal(alone, disturbed)


def test_a_worker_that_never_answers_is_replaced(
    alone: RunFolder, language: Path, tmp_path: Path, pids: dict[int, int]
) -> None:
    data, stopped = language_recipe(language, {"name": "grpo"}), []

    def stop(task: str) -> None:
        os.kill(pids[1], SIGSTOP)
        stopped.append(pids[1])

    with pytest.MonkeyPatch.context() as patched:
        at_first(patched, ["update"], stop)
        disturbed = go(data, tmp_path / "run", 2, patience=20, restarts=1)
    os.kill(stopped[0], SIGKILL)  # one of another machine ends when it finds the driver gone
    assert_equal(alone, disturbed)
    log = (disturbed.path / "log.txt").read_text()
    assert "worker 1 has not answered for 20 s while " in log and "new workers started in" in log


def test_the_end_of_a_worker_is_noticed_at_once(
    language: Path, tmp_path: Path, pids: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, noticed = {}, {}
    now = ""

    def kill(task: str) -> None:
        nonlocal now
        now, killed[task] = task, time.monotonic()
        os.kill(pids[1], SIGKILL)

    honest = workers.Workers.restart

    def restart(self: workers.Workers) -> None:
        noticed[now] = time.monotonic()
        honest(self)

    monkeypatch.setattr(workers.Workers, "restart", restart)
    tasks = ["sample", "share", "update", "publish", "save"]
    at_first(monkeypatch, tasks, kill)
    data = language_recipe(language, {"name": "grpo"})
    go(data, tmp_path / "run", 2, restarts=5)
    assert not tasks and len(noticed) == 5
    seconds = {task: noticed[task] - killed[task] for task in killed}
    assert max(seconds.values()) < 2, seconds


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


def test_a_worker_that_is_ten_times_slower_gets_less_work_and_a_warning(
    language: Path, tmp_path: Path, pids: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = language_recipe(language, {"name": "grpo"}) | {"steps": 8, "sampler": {"batch": 1}}
    data["algorithm"]["max_tokens"] = 32
    made, dealt = [0, 0], []
    send, train = Processes.send, workers.Workers.train

    def counted(self: Processes, rank: int, task: str, content: Any, *rest: bytes) -> None:
        made[rank] += task == "sample"
        if task == "update":
            dealt.append(content["slowness"])
        send(self, rank, task, content, *rest)

    def slow(self: workers.Workers, *arguments: Any) -> Any:
        if not slowing:
            slowing.append(slowed(pids[1]))
            slowing[0].__enter__()
        return train(self, *arguments)

    slowing: list[Any] = []
    monkeypatch.setattr(Processes, "send", counted)
    monkeypatch.setattr(workers.Workers, "train", slow)
    try:
        disturbed = go(data, tmp_path / "run", 2)
    finally:
        slowing[0].__exit__(None, None, None)
    assert made[1] < made[0] / 2
    assert dealt[-1][0] == 1.0 and dealt[-1][1] > 3
    assert "warning (slow-worker): worker 1 took" in (disturbed.path / "log.txt").read_text()
    assert_equal(go(data, tmp_path / "alone"), disturbed)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("not allowed to mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("moment", ["train", "save", "publish"])
def test_a_full_disk_stops_the_run_which_is_then_resumed(
    alone: RunFolder,
    language: Path,
    small_disk: Path,
    pids: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    data, folder = language_recipe(language, {"name": "grpo"}), small_disk / "run"
    honest, filler = getattr(workers.Workers, moment), small_disk / "filler"

    def fill(self: workers.Workers, *arguments: Any) -> Any:
        if (folder / "checkpoints" / "000001").exists() and not filler.exists():
            with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
                while file.write(b"0" * 4096):
                    pass
        return honest(self, *arguments)

    monkeypatch.setattr(workers.Workers, moment, fill)
    with pytest.raises(StopRun, match=r"free disk space and run `gesso train --resume") as raised:
        go(data, folder, 2)
    assert "the last complete checkpoint is step 1" in str(raised.value)
    filler.write_bytes(b"")
    assert_equal(alone, run.resume(folder, quiet=True))


def test_a_driver_that_is_killed_again_and_again(
    alone: RunFolder, language: Path, tmp_path: Path
) -> None:
    """While it starts, and some time after it begins each step; with a worker each time."""
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "run"
    data = language_recipe(language, {"name": "grpo"}) | {"cluster": {"workers": 1}}
    recipe.write_bytes(tomli_w.dumps(data).encode())
    moments = ["config.toml", "metrics.jsonl", *(f"checkpoints/00000{i}" for i in (1, 2))]
    for number, moment in enumerate(moments):
        new = [str(recipe), "--run", str(folder)]
        command = ["--resume", str(folder)] if folder.exists() else new
        with forked.gesso("train", *command, output=tmp_path / f"{number}.log") as driver:
            until((folder / moment).exists, partial(getattr, driver, "exitcode"))
            time.sleep(0.1 * number)
            assert driver.pid is not None
            os.kill(driver.pid, SIGKILL)
    assert_equal(alone, run.resume(folder, quiet=True))

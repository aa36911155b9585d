"""Workers in processes that torchrun starts."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from signal import SIGINT
from types import SimpleNamespace

import pytest
import tomli_w

from gesso import build, run
from gesso.cluster.launched import Launch
from gesso.cluster.placement import place
from gesso.cluster.processes import Processes, WorkerFailed
from gesso.track.run_folder import RunFolder
from gesso.types import UserError
from tests.cluster.runs import assert_equal, go, language_recipe
from tests.waiting import until

ENVIRONMENT = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
}  # fmt: skip
TALKING_WORKER = """
import threading, time
from gesso.cli import main

def talk():
    while True:
        print("hello")
        time.sleep(0.1)

threading.Thread(target=talk, daemon=True).start()
main(["train", "demo"])
"""


def test_the_place_of_a_process() -> None:
    assert Launch.find({}) is None
    assert Launch.find(ENVIRONMENT) == Launch(1, 4)
    assert Launch.find(ENVIRONMENT | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}) is None
    with pytest.raises(UserError, match="4 processes on several machines, 2 of them on this one"):
        Launch.find(ENVIRONMENT | {"LOCAL_WORLD_SIZE": "2"})


def test_gpus_of_all_processes() -> None:
    launch = Launch(0, 2)
    assert launch.gpus(()) == ()
    assert launch.gpus(("4", "5")) == ("4", "5")
    assert launch.gpus(("3",)) == ("3", "3"), "each process sees its own"


def test_a_run_started_by_torchrun(language: Path, tmp_path: Path) -> None:
    data = language_recipe(language, {"name": "grpo"}) | {"steps": 1, "eval": {"every": 0}}
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_bytes(tomli_w.dumps(data).encode())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "--", "gesso", "train", str(recipe), "--run", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 worker processes (CPU, 1 thread each)" in done.stdout
    assert_equal(go(data, tmp_path / "alone"), RunFolder.open(folder))


def test_a_launched_worker_prints_to_the_driver_and_ends_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here the driver hosts the store, as with launchers other than torchrun."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = ENVIRONMENT | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    notes: list[str] = []
    progress = SimpleNamespace(note=notes.append, phase=print, advance=print)
    launched = subprocess.Popen([sys.executable, "-c", TALKING_WORKER])
    processes = Processes(2, lambda rank: {}, 60.0, progress, Launch(0, 2))
    try:
        launched.send_signal(SIGINT)  # as Ctrl-C does to all processes
        with pytest.raises(WorkerFailed, match=r"worker 1 failed(.|\n)*KeyError: 'nonsense'"):
            processes.one(1, "nonsense", {})
        until(lambda: notes, limit=30)
    finally:
        processes.close()
    assert launched.wait(30) == 0
    assert notes == ["worker 1: hello"]


@pytest.mark.parametrize("workers", [2, None])
def test_another_number_of_workers(
    workers: int | None, language: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    data = language_recipe(language, {"name": "grpo"})
    recipe = build.recipe_from(data | {"cluster": {"workers": workers}})
    message = f"cluster.workers = {workers or 'none'}, but torchrun started 4 processes; leave out"
    with pytest.raises(UserError, match=message):
        place(recipe, build.algorithm(recipe))
    if workers is None:  # not placed, but refused
        with pytest.raises(UserError, match=message):
            run.assemble(recipe)

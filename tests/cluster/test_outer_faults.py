"""Runs that lose their driver, a reward server or a disk end like undisturbed ones: `make
test-faults`. Each is lost at every moment of a run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from gesso import run
from gesso.cluster import workers
from gesso.cluster.processes import Processes
from gesso.rewards.transport import pool
from gesso.track.run_folder import RunFolder
from gesso.types import StopRun
from tests import forked
from tests.cluster.moments import MOMENTS, at_moments
from tests.cluster.pools import Forked
from tests.cluster.runs import assert_equal, go, language_recipe
from tests.rewards.servers import free_port
from tests.waiting import LIMIT, until

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not os.environ.get("GESSO_FAULTS"), reason="make test-faults runs them"),
]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("not allowed to mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.usefixtures("pids")
def test_a_full_disk_stops_the_run_which_is_then_resumed(
    alone: RunFolder, language: Path, small_disk: Path
) -> None:
    """In the second step, which is repeated each time."""
    data, folder = language_recipe(language, {"name": "grpo"}), small_disk / "run"
    filler = small_disk / "filler"
    for moment in ("sample", "train", "publish", "evaluate", "save"):
        name = "sample_step" if moment == "sample" else moment
        honest = getattr(workers.Workers, name)

        def fill(self: workers.Workers, *arguments: Any, honest: Any = honest) -> Any:
            if (folder / "checkpoints" / "000001").exists() and not filler.stat().st_size:
                with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
                    while file.write(b"0" * 4096):
                        pass
            return honest(self, *arguments)

        filler.write_bytes(b"")
        stopped = pytest.raises(StopRun, match=r"free disk space and run `gesso train --resume")
        with pytest.MonkeyPatch.context() as patched, stopped as raised:
            patched.setattr(workers.Workers, name, fill)
            if folder.exists():
                run.resume(folder, quiet=True)
            else:
                go(data, folder, 2)
        assert "the last complete checkpoint is step 1" in str(raised.value), moment
    filler.unlink()
    assert_equal(alone, run.resume(folder, quiet=True))


def drive(data: dict[str, Any], folder: Path, moments: Sequence[str], step: int) -> None:
    """A driver that is killed at the last of these moments after the checkpoint of `step`."""
    forked.serve_from_here()
    Processes._start = Forked._start  # type: ignore[method-assign, assignment]

    def happens(moment: str) -> None:
        if moment == moments[-1]:
            os.kill(os.getpid(), SIGKILL)

    def saved() -> bool:
        return (RunFolder.open(folder).latest() or 0) >= step

    at_moments(pytest.MonkeyPatch(), moments, happens, saved)
    if folder.exists():
        run.resume(folder, quiet=True)
    else:
        go(data, folder, 2)


def test_a_driver_that_is_killed(alone: RunFolder, language: Path, tmp_path: Path) -> None:
    data, folder = language_recipe(language, {"name": "grpo"}), tmp_path / "run"
    moments = {"evaluate": 0, "sample": 0, "score": 1, "update": 1, "update publish": 1, "save": 2}
    for names, step in moments.items():
        driver = forked.started(drive, data, folder, names.split(), step, daemon=False)
        driver.join(LIMIT)
        assert driver.exitcode == -SIGKILL, names
        assert (RunFolder.open(folder).latest() or 0) == step
    overrides = ["cluster.workers=none"]
    assert_equal(alone, run.resume(folder, quiet=True, overrides=overrides))


def test_a_reward_server_that_is_killed(
    language: Path, tmp_path: Path, pids: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one starts at its port each time. "score": while it has requests."""
    monkeypatch.setattr(pool, "FIRST_BACKOFF", 0.1)
    hold, begun, port = tmp_path / "hold", tmp_path / "begun", free_port()
    reward: dict[str, Any] = {"name": "tests.token_rewards:held"}
    command = ["serve-reward", reward["name"], f"folder={tmp_path}", "--port", str(port)]
    servers: list[ForkServerProcess] = []

    def start(stack: ExitStack) -> Callable[[], bool]:
        """Whether it listens."""
        output = tmp_path / f"server-{len(servers)}.log"
        servers.append(stack.enter_context(forked.gesso(*command, output=output)))
        return lambda: output.exists() and " at http" in output.read_text()

    def replace(moment: str) -> None:
        until(begun.exists if moment == "score" else listens[-1])
        servers[-1].kill()
        servers[-1].join()
        begun.unlink(missing_ok=True)
        if moment == "sample":
            hold.touch()
        else:
            hold.unlink(missing_ok=True)
        listens.append(start(stack))

    data = language_recipe(language, {"name": "grpo"})
    remote = {"urls": [f"http://127.0.0.1:{port}"], "timeout": 60.0, "retries": 50, "batch": 1}
    with pytest.MonkeyPatch.context() as patched, ExitStack() as stack:
        listens = [start(stack)]
        until(listens[0])
        left = at_moments(patched, MOMENTS, replace)
        disturbed = go(data | {"reward": [reward | {"remote": remote}]}, tmp_path / "run", 2)
    assert not left and len(servers) == 1 + len(MOMENTS)
    here = go(data | {"reward": [reward | {"folder": str(tmp_path)}]}, tmp_path / "here")
    assert_equal(here, disturbed)

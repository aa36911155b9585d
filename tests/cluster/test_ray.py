"""Workers as actors of a Ray cluster of two nodes: `make test-ray`."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import tomli_w

from gesso import build, run
from gesso.cluster import workers
from gesso.cluster.placement import place
from gesso.cluster.ray_actors import Actors
from gesso.cluster.ray_nodes import nodes
from gesso.track.progress import SILENT
from gesso.types import StopRun, UserError
from tests.cluster.ray_nodes import HEAD, OTHER, TOKEN, RayCluster, cable
from tests.cluster.runs import alive, assert_equal, go, language_recipe
from tests.conftest import small_recipe
from tests.waiting import Started, until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="make test-ray installs it"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    os.environ.update(TOKEN)  # before Ray is imported
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        started = RayCluster(Path(folder))
        try:
            started.add()
            yield started
        finally:
            import ray

            ray.shutdown()
            started.close()


def test_a_cluster_with_a_token_refuses_others(cluster: RayCluster) -> None:
    """All tests of this file have it."""
    code = f"import ray; ray.init({cluster.address!r}); print(ray.nodes())"
    for given, refused in ((TOKEN, False), (TOKEN | {"RAY_AUTH_TOKEN": "0" * 64}, True)):
        command = [sys.executable, "-c", code]
        found = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | given
        )
        assert (found.returncode != 0) == refused, found.stderr
        assert ("AuthenticationError" in found.stderr) == refused


def actor_pids(name: str = "ray::Actor") -> list[int]:
    """Of the processes that Ray calls so."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(name.encode()):
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return found


def test_a_run_on_two_nodes_is_that_of_one_process(
    cluster: RayCluster, pipeline_folder: Path, prompt_file: Path, language: Path, tmp_path: Path
) -> None:
    """A language model and an image model, whose images travel as bytes."""
    flow = small_recipe(pipeline_folder, prompt_file) | {"sampler": {"batch": 2}, "steps": 2}
    for data in (language_recipe(language, {"name": "grpo"}), flow):
        name = data["algorithm"]["name"]
        together = go(data, tmp_path / f"{name}-ray", None, address=cluster.address)
        assert_equal(go(data, tmp_path / name), together)
        log = (together.path / "log.txt").read_text()
        assert "2 worker processes (CPU, 1 thread each) on a Ray cluster of 2 nodes" in log
        assert together.rows()[-1]["cluster/sent_gb"] > 0
        assert run.recipe_of(together).cluster.workers == "auto"
    until(lambda: not actor_pids(), limit=60)


def test_workers_are_placed_and_listen_at_the_address_of_their_node(
    cluster: RayCluster, language: Path
) -> None:
    data = language_recipe(language, {"name": "grpo"})
    recipe = build.recipe_from(data | {"cluster": {"address": cluster.address}})
    placement = place(recipe, build.algorithm(recipe))
    assert placement is not None
    processes = Actors(placement, 60.0, SILENT)
    try:
        assert sorted(processes.address(rank) for rank in range(2)) == [HEAD, OTHER]
        store = processes.store()
        assert store["host"] == processes.address(0)
        host = bytes(map(int, store["host"].split(".")))[::-1].hex().upper()
        listening = re.findall(r": (\w+:\w+) 0+:0+ 0A ", Path("/proc/net/tcp").read_text())
        assert f"{host}:{store['port']:04X}" in listening
    finally:
        processes.close()


@pytest.fixture
def three_nodes(cluster: RayCluster) -> Iterator[RayCluster]:
    node = cluster.add("127.0.0.5")
    yield cluster
    node.kill()
    until(lambda: len(nodes(cluster.address)) == 2, limit=120)  # Ray notices it later


def test_samplers_apart_one_of_which_is_killed(
    three_nodes: RayCluster, language: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node for the worker that trains, and one for each sampler. The run is that of processes
    of this machine."""
    data = language_recipe(language, {"name": "grpo"}) | {"lag": 1}
    here = go(data, tmp_path / "here", 1, samplers=2)
    pids: dict[int, int] = {}
    killed: list[int] = []
    honest = Actors.send

    def send(self: Actors, rank: int, task: str, content: Any, *data: bytes) -> None:
        if task == "start":
            life: Any = self.workers[rank].life
            pids[rank] = life.ray.get(life.actor.__ray_call__.remote(lambda actor: os.getpid()))
        honest(self, rank, task, content, *data)
        if task == "sample" and rank == 2 and content["key"].startswith("1.") and not killed:
            killed.append(rank)
            os.kill(pids[rank], SIGKILL)

    monkeypatch.setattr(Actors, "send", send)
    there = go(data, tmp_path / "there", 1, samplers=2, address=three_nodes.address)
    assert killed
    assert_equal(here, there)
    log = (there.path / "log.txt").read_text()
    assert "3 worker processes (CPU, 1 thread each), 1 to train and 2 to sample on a Ray" in log
    assert re.search(r"worker 2 ended .*on Ray node.*; it was a sampler, and 1 go on", log)
    assert "starting new workers" not in log
    row = there.rows()[1]
    assert row["cluster/weights_gb"] > 0
    assert row["cluster/sent_gb"] == here.rows()[1]["cluster/sent_gb"] > 0


def test_more_workers_than_the_cluster_has_places_for(cluster: RayCluster, language: Path) -> None:
    data = language_recipe(language, {"name": "grpo"})
    for changes, message in (
        ({"workers": 3}, "cluster.workers = 3, but the Ray cluster has 2 CPU workers of 1 threads"),
        ({"model": "cuda"}, 'model.device = "cuda", but the Ray cluster has no GPUs'),
    ):
        model = data["model"] | {"device": changes.pop("model", "cpu")}
        ray = {"cluster": {"address": cluster.address, **changes}, "model": model}
        with pytest.raises(UserError, match=re.escape(message)):
            run.assemble(build.recipe_from(data | ray))


def test_workers_end_with_a_driver_that_is_killed(
    cluster: RayCluster, language: Path, tmp_path: Path
) -> None:
    """The run is then resumed without Ray."""
    data = language_recipe(language, {"name": "grpo"}) | {"steps": 1000}
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_bytes(tomli_w.dumps(data).encode())
    command = [sys.executable, "-m", "gesso", "train", str(recipe), "--run", str(folder)]
    driver = Started([*command, f"cluster.address={cluster.address}"])
    driver.until(lambda: (folder / "checkpoints" / "000001").exists())
    pids = actor_pids()
    assert len(pids) == 2
    driver.process.kill()
    until(lambda: not any(alive(pid) for pid in pids), limit=60)
    steps = (run.RunFolder.open(folder).latest() or 0) + 1
    overrides = ["cluster.address=none", "cluster.workers=none"]
    resumed = run.resume(folder, quiet=True, steps=steps, overrides=overrides)
    assert resumed.rows()[-1]["step"] == steps


def test_a_run_that_loses_a_worker_and_a_node_ends_as_if_it_had_not(
    cluster: RayCluster, language: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process is killed in the second step, and in the third all processes of a node: the other
    node goes on alone."""
    data = language_recipe(language, {"name": "grpo"})

    def lose_node() -> None:
        cluster.nodes[1].kill()
        until(lambda: len(actor_pids()) == 1)  # an actor ends soon after its node

    faults = {1: lambda: os.kill(actor_pids()[0], SIGKILL), 2: lose_node}
    honest = workers.Workers.train

    def train(self: workers.Workers, rollout: Any, step: int, scales: Any) -> Any:
        faults.pop(step, lambda: None)()
        return honest(self, rollout, step, scales)

    with monkeypatch.context() as patched:
        patched.setattr(workers.Workers, "train", train)
        disturbed = go(data, tmp_path / "run", 2, address=cluster.address, restarts=2)
    assert not faults
    assert_equal(go(data, tmp_path / "alone"), disturbed)
    log = (disturbed.path / "log.txt").read_text()
    assert re.search(r"worker \d ended while .* \(on Ray node 127.0.0.\d: its worker process", log)
    assert "which continue after step 1 and repeat 0 steps of 0.0 s (restarts left: 1)" in log
    assert "which continue after step 2 and repeat 0 steps of 0.0 s (restarts left: 0)" in log


def test_a_network_that_is_down_for_ten_seconds(language: Path, tmp_path: Path) -> None:
    """A second node in a network namespace. The run waits; nothing is repeated."""
    data = language_recipe(language, {"name": "grpo"}) | {"steps": 6}
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_bytes(tomli_w.dumps(data).encode())
    with ExitStack() as stack:
        try:
            network = stack.enter_context(cable())
        except (subprocess.CalledProcessError, FileNotFoundError):
            pytest.skip("not allowed to create network namespaces")
        files = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        )
        apart = RayCluster(Path(files), network.here)
        stack.callback(apart.close)
        apart.add(network.there, network.through)
        command = [sys.executable, "-m", "gesso", "train", str(recipe), "--run", str(folder)]
        options = [f"cluster.address={apart.address}", "cluster.workers=2"]
        driver = Started([*command, *options], env=os.environ | TOKEN)
        stack.callback(driver.end)
        driver.until(lambda: (folder / "checkpoints" / "000001").exists())
        network.set("down")
        time.sleep(10)
        network.set("up")
        until(lambda: driver.process.poll() is not None)
        assert driver.process.returncode == 0, driver.output()
    together = run.RunFolder.open(folder)
    assert max(row["time/step"] for row in together.rows()) > 8
    assert "starting new workers" not in (folder / "log.txt").read_text()
    assert_equal(go(data, tmp_path / "alone"), together)


HIDE = 'mount -t tmpfs -o size=64m none "$0" && exec "$@"'


@pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="not allowed to create mount namespaces",
)
def test_a_node_that_does_not_see_the_run_folder_and_whose_disk_is_full(
    cluster: RayCluster, language: Path, tmp_path: Path
) -> None:
    """Checkpoints are sent to the driver, and from it to the workers when the run is resumed."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    if cluster.nodes[1].started.process.poll() is None:  # without the test before
        cluster.nodes[1].kill()
    through = ["env", f"TMPDIR={hidden}", "unshare", "-m", "sh", "-c", HIDE, str(hidden)]
    node = cluster.add("127.0.0.4", through)
    data = language_recipe(language, {"name": "grpo"})
    data["eval"]["every"] = 1
    folder = go(data | {"steps": 1}, hidden / "run", 2, address=cluster.address).path
    assert (folder / "checkpoints" / "000001" / "learner.safetensors").stat().st_size > 1000

    disk = Path(f"/proc/{node.started.process.pid}/root{hidden}")
    with (disk / "filler").open("wb", buffering=0) as filler:
        with pytest.raises(OSError):
            while filler.write(b"0" * 4096):
                pass
        filler.truncate(filler.tell() - 2**14)  # or workers would find another folder
    full = r"worker \d on Ray node 127.0.0.4: .*No space left.*; free disk space and run `gesso"
    with pytest.raises(StopRun, match=full):
        run.resume(folder, quiet=True, steps=3)
    (disk / "filler").unlink()
    resumed = run.resume(folder, quiet=True, steps=3)
    assert_equal(go(data, tmp_path / "alone"), resumed)
    copies = [*Path(tempfile.gettempdir()).glob("gesso-*"), *disk.glob("gesso-*")]
    assert not [file for copy in copies for file in copy.glob("*/*.safetensors")]

"""Workers as actors of a Ray cluster of two nodes: `make test-ray`."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import tomli_w

from gesso import build, run
from gesso.cluster import workers
from gesso.cluster.placement import Placement, place
from gesso.cluster.ray_actors import Actors
from gesso.cluster.ray_nodes import nodes
from gesso.track.progress import SILENT
from gesso.types import StopRun, UserError
from tests.cluster.moments import MOMENTS, at_moments
from tests.cluster.ray_nodes import HEAD, OTHER, TOKEN, RayCluster, cable, hexadecimal
from tests.cluster.runs import alive, assert_equal, go, language_recipe
from tests.conftest import small_recipe
from tests.waiting import Started, until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="make test-ray installs it"),
]


@pytest.fixture(scope="module", autouse=True)
def token() -> Iterator[None]:
    """Of all clusters of this file. Ray reads it when it is imported."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in TOKEN.items():
            patched.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
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
    until(lambda: not actor_pids())


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
        host = hexadecimal(store["host"])
        listening = re.findall(r": (\w+:\w+) 0+:0+ 0A ", Path("/proc/net/tcp").read_text())
        assert f"{host}:{store['port']:04X}" in listening
    finally:
        processes.close()


@pytest.fixture
def three_nodes(cluster: RayCluster) -> Iterator[RayCluster]:
    node = cluster.add("127.0.0.5")
    yield cluster
    node.kill()
    until(lambda: len(nodes(cluster.address)) == 2)  # Ray notices it later


def test_samplers_apart_one_of_which_is_killed(
    three_nodes: RayCluster,
    language: Path,
    tmp_path: Path,
    pids: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node for the worker that trains, and one for each sampler. The run is that of processes
    of this machine."""
    data = language_recipe(language, {"name": "grpo"}) | {"lag": 1}
    here = go(data, tmp_path / "here", 1, samplers=2)
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
    lost = r"worker 2 ended .*on Ray node.*; it was a sampler, and 1 more continue without it"
    assert re.search(lost, log)
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
    until(lambda: not any(alive(pid) for pid in pids))
    steps = (run.RunFolder.open(folder).latest() or 0) + 1
    overrides = ["cluster.address=none", "cluster.workers=none"]
    resumed = run.resume(folder, quiet=True, steps=steps, overrides=overrides)
    assert resumed.rows()[-1]["step"] == steps


def test_a_run_that_loses_nodes_ends_as_if_it_had_not(
    cluster: RayCluster,
    alone: run.RunFolder,
    language: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At every moment all processes of a worker's node are killed. Another node, which started
    before, replaces it."""
    running: list[Actors] = []
    restarts, joining = iter(range(10, 99)), ThreadPoolExecutor(1)
    reserve = Actors._reserve
    killed: list[float] = []
    noticed: list[float] = []
    replaced: list[float] = []

    def reserved(self: Actors, placement: Placement, patience: float) -> None:
        reserve(self, placement, patience)
        running.append(self)

    def lose_node(moment: str) -> None:
        spare.append(joining.submit(cluster.add, f"127.0.0.{next(restarts)}"))
        spare[-2].result()
        used = [running[-1].address(rank) for rank in range(2)]
        (node,) = [n for n in cluster.alive if n.address in used and n.address != HEAD][-1:]
        killed.append(time.monotonic())
        node.kill()

    honest = workers.Workers.restart

    def restart(self: workers.Workers) -> None:
        noticed.append(time.monotonic())
        honest(self)
        replaced.append(time.monotonic())

    spare = [joining.submit(cluster.add, f"127.0.0.{next(restarts)}")]
    with monkeypatch.context() as patched, joining:
        patched.setattr(Actors, "_reserve", reserved)
        patched.setattr(workers.Workers, "restart", restart)
        # A loss while the driver waits for scores may be noticed only by the update.
        left = at_moments(patched, MOMENTS, lose_node, lambda: len(replaced) == len(killed))
        data = language_recipe(language, {"name": "grpo"})
        cluster_keys = {"address": cluster.address, "restarts": len(MOMENTS)}
        disturbed = go(data, tmp_path / "run", 2, **cluster_keys)
    assert not left
    for name, times in (("noticed", noticed), ("replaced", replaced)):
        seconds = [time - moment for time, moment in zip(times, killed, strict=True)]
        print(name, " ".join(f"{each:.1f}" for each in seconds))
    assert_equal(alone, disturbed)
    log = (disturbed.path / "log.txt").read_text()
    assert len(re.findall(r"worker \d ended while .* \(on Ray node 127.0.0.\d+: ", log)) == 6
    assert "(restarts left: 0)" in log


def test_a_network_that_is_down_for_ten_seconds(
    alone: run.RunFolder, language: Path, tmp_path: Path
) -> None:
    """A second node in a network namespace, which is cut off at every moment. The run waits;
    nothing is repeated."""
    import ray

    data = language_recipe(language, {"name": "grpo"})
    ray.shutdown()
    with ExitStack() as stack:
        try:
            network = stack.enter_context(cable())
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            if b"exists" in getattr(error, "stderr", b""):  # of a run that has not yet ended
                raise
            pytest.skip("not allowed to create network namespaces")
        files = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        )
        apart = RayCluster(Path(files), network.here)
        stack.callback(apart.close)
        stack.callback(ray.shutdown)
        apart.add(network.there, network.through)
        timers: list[threading.Timer] = []

        def cut(moment: str) -> None:
            if timers:
                timers[-1].join()
                until(lambda: network.recovered)
            network.set("down")
            timers.append(threading.Timer(10, network.set, ("up",)))
            timers[-1].start()

        with pytest.MonkeyPatch.context() as patched:
            left = at_moments(patched, MOMENTS, cut)
            together = go(data, tmp_path / "run", 2, address=apart.address)
        assert not left
    assert "starting new workers" not in (together.path / "log.txt").read_text()
    assert_equal(alone, together)


HIDE = 'mount -t tmpfs -o size=64m none "$0" && exec "$@"'


@pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="not allowed to create mount namespaces",
)
def test_a_node_that_does_not_see_the_run_folder_and_whose_disk_is_full(
    cluster: RayCluster, alone: run.RunFolder, language: Path, tmp_path: Path
) -> None:
    """Checkpoints are sent to the driver, and from it to the workers when the run is resumed. Both
    workers are on that node. The disk is full at each of these moments of the second step, and when
    the run is resumed."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for node in cluster.alive[1:]:
        node.kill()
    through = ["env", f"TMPDIR={hidden}", "unshare", "-m", "sh", "-c", HIDE, str(hidden)]
    node = cluster.add("127.0.0.4", through, cpus=2)
    until(lambda: len(nodes(cluster.address)) == 2)
    disk = Path(f"/proc/{node.started.process.pid}/root{hidden}")
    data, folder, filler = language_recipe(language, {"name": "grpo"}), hidden / "run", disk / "f"

    def fill(moment: str) -> None:
        with filler.open("wb", buffering=0) as file:
            with pytest.raises(OSError):
                while file.write(b"0" * 4096):
                    pass
            file.truncate(file.tell() - 2**14)  # or workers would find another folder

    def goes_on() -> None:
        if folder.exists():
            run.resume(folder, quiet=True)
        else:
            go(data, folder, 2, address=cluster.address)

    full = r"worker \d on Ray node 127.0.0.4: .*No space left.*; free disk space and run `gesso"
    for moment in ("sample", "score", "update", "publish", "resume"):
        with pytest.MonkeyPatch.context() as patched, pytest.raises(StopRun, match=full):
            if moment == "resume":
                fill(moment)
            else:
                saved = (folder / "checkpoints" / "000001").exists
                left = at_moments(patched, [moment], fill, saved)
            goes_on()
        filler.unlink()
        assert not left and run.RunFolder.open(folder).latest() == 1
    goes_on()
    assert_equal(alone, run.RunFolder.open(folder))
    copies = [*Path(tempfile.gettempdir()).glob("gesso-*"), *disk.glob("gesso-*")]
    assert not [file for copy in copies for file in copy.glob("*/*.safetensors")]

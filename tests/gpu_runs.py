"""Runs of tiny compiled models on a CUDA device, each in processes of its own, which are forked:
imports would take most of their time. The process from which they are forked has not used CUDA."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tomli_w

from gesso.track.run_folder import RunFolder
from tests import forked, pipelines, tokens
from tests.background import Background
from tests.pinned.runs import UNREPEATABLE

# Imports ask for devices, after which a forked process could not use them; NVML leaves them alone.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

STEPS, DEVICE = 4, "cuda"
AT_ONCE = max(2, min(14, (os.cpu_count() or 1) - 2))
"""Runs at a time: two cores are left for other tests. Bounds host memory, too, as each process
imports torch with CUDA."""
KINDS = {"sd35": "sd3", "flux-dev": "flux", "qwen-image": "qwen-image", "qwen2": "causal"}
SECONDS = 500  # until a run is killed
NOT_REPEATED = (*UNREPEATABLE, "cached", "cluster/")  # a resumed run has no cached scores


def recipe(name: str, folder: Path, prompts: Path) -> Path:
    """All passes have one number of rows: three samples, in evaluations, too, with guidance."""
    data = {"train": str(prompts), "eval": str(prompts), "groups": 2}
    common = {"device": DEVICE, "dtype": "bfloat16", "lora": {"rank": 4, "alpha": 8}}
    table: dict[str, Any] = {"steps": STEPS, "data": data, "eval": {"every": 2, "prompts": 3}}
    table |= {"save": {"every": 1, "keep": STEPS}, "learner": {"micro_batch": 3}}
    if name == "qwen2":
        model = tokens.build(name, folder / "model", 64)
        table["model"] = common | {"name": "causal", "path": str(model), "compile": True}
        table["algorithm"] = {"name": "grpo", "group": 4, "max_tokens": 200}
        table["reward"] = [{"name": "tests.token_rewards:early"}]
        table["learner"] = {"micro_tokens": 512}
    else:
        layers = {"num_layers": 2} if name == "sd35" else {}  # of two kinds
        model = pipelines.build(name, folder / "model", 8, **layers)
        size = {"height": 64, "width": 64, "text_length": 16}
        table["model"] = common | size | {
            "name": KINDS[name], "path": str(model), "compile": True, "fold": True,
        }  # fmt: skip
        table["algorithm"] = {
            "name": "flow-grpo", "group": 3, "steps": 4, "guidance": 3.0, "beta": 0.04,
        }  # fmt: skip
        table["sampler"] = {"batch": 3}
        table["eval"] |= {"steps": 4}
        table["reward"] = [{"name": "jpeg-compressibility"}]
    file = folder / "recipe.toml"
    file.write_text(tomli_w.dumps(table))
    return file


_started: list[forked.Gesso] = []


def kill_all() -> None:
    for process in [*_started]:
        if process.poll() is None:
            kill(process)


def kill(process: forked.Gesso) -> None:
    """Its workers, too."""
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # if it is not yet the first process of its session


def started(
    run: Path,
    recipe: Path,
    cache: Path,
    overrides: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    new: bool | None = None,
) -> forked.Gesso:
    """A new run or, if it has begun, the rest of it."""
    if new is None:
        new = not (run / "config.toml").exists()
    arguments = [str(recipe), *overrides, "--run", str(run)] if new else ["--resume", str(run)]
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "1",
        **(variables or {}),
    }  # fmt: skip
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or each worker compiles all it imports
    log = run.parent / f"{run.name}.log"
    process = forked.Gesso(["train", *arguments], environment, Path.cwd(), log)
    _started.append(process)
    return process


def trained(run: Path, recipe: Path, cache: Path, overrides: Sequence[str] = ()) -> Path:
    finished(started(run, recipe, cache, overrides), run)
    return run


def trained_on_two(run: Path, recipe: Path, cache: Path, overrides: Sequence[str] = ()) -> Path:
    """Two workers on one GPU. NCCL rejects two ranks of one host on the same GPU, so each rank
    claims to be another host; messages go through sockets."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "NCCL_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip
    ranks = [
        started(
            run, recipe, cache, overrides,
            common | {"RANK": f"{i}", "LOCAL_RANK": f"{i}", "NCCL_HOSTID": f"host {i}"}, new=True,
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        for process in ranks:
            finished(process, run)
    finally:
        for process in ranks:
            kill(process)
    return run


def finished(process: forked.Gesso, run: Path) -> None:
    log = run.parent / f"{run.name}.log"
    try:
        status = process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        kill(process)
        status = process.wait()
    assert status == 0, f"{run.name}: status {status}\n{log.read_text()[-2000:]}"


def write_prompts(folder: Path) -> Path:
    file = folder / "prompts.txt"
    file.write_text("a red kite\na blue sign in the wind\nan oak\n")
    return file


def result(future: Future[Path]) -> tuple[list[dict], dict[str, bytes]]:
    """Of a run, once it has ended: rows without timings, and all files of the last checkpoint."""
    run = future.result()
    folder = RunFolder(run)
    rows = [
        {k: v for k, v in row.items() if not k.startswith(NOT_REPEATED)} for row in folder.rows()
    ]
    last = sorted((run / "checkpoints").iterdir())[-1]
    return rows, {file.name: file.read_bytes() for file in last.glob("*.safetensors")}


class SessionRuns:
    """The runs of a test session. A test module that needs any has a function `start_runs`."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self.factory = factory
        self.background = Background(AT_ONCE, kill_all)
        self._made: dict[str, Any] = {}

    def of(self, module: ModuleType) -> Any:
        """What `start_runs` of the module returns; called once."""
        if module.__name__ not in self._made:
            folder = self.factory.mktemp("runs")
            self._made[module.__name__] = module.start_runs(self.background, folder)
        return self._made[module.__name__]

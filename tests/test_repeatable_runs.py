"""On a CUDA device the same recipe gives the same run, bit by bit, in every process: with an empty
compile cache, with a filled one, and after a SIGKILL. Sequences are longer than a block of the
attention kernels, whose order of summation matters only then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from gesso.track.run_folder import RunFolder
from tests import pipelines, tokens
from tests.pinned.runs import UNREPEATABLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS, DEVICE = 4, "cuda"
KINDS = {"sd35": "sd3", "flux-dev": "flux", "qwen-image": "qwen-image", "qwen2": "causal"}
NOT_REPEATED = (*UNREPEATABLE, "cached")  # a resumed run has no cached scores


def recipe(name: str, folder: Path, prompts: Path) -> Path:
    data = {"train": str(prompts), "eval": str(prompts), "groups": 2}
    common = {"device": DEVICE, "dtype": "bfloat16", "lora": {"rank": 4, "alpha": 8}}
    table: dict[str, Any] = {"steps": STEPS, "data": data, "eval": {"every": 2, "prompts": 3}}
    table |= {"save": {"every": 1, "keep": STEPS}, "learner": {"micro_batch": 6}}
    if name == "qwen2":
        model = tokens.build(name, folder / "model", 64)
        table["model"] = common | {"name": "causal", "path": str(model), "compile": True}
        table["algorithm"] = {"name": "grpo", "group": 4, "max_tokens": 200}
        table["reward"] = [{"name": "tests.token_rewards:early"}]
        table["learner"] = {"micro_tokens": 512}
    else:
        model = pipelines.build(name, folder / "model", 8)
        size = {"height": 64, "width": 64, "text_length": 16}
        table["model"] = common | size | {
            "name": KINDS[name], "path": str(model), "compile": True, "fold": True,
        }  # fmt: skip
        table["algorithm"] = {
            "name": "flow-grpo", "group": 3, "steps": 4, "guidance": 3.0, "beta": 0.04,
        }  # fmt: skip
        table["sampler"] = {"batch": 4}
        table["eval"] |= {"steps": 4}
        table["reward"] = [{"name": "jpeg-compressibility"}]
    file = folder / "recipe.toml"
    file.write_text(tomli_w.dumps(table))
    return file


def started(run: Path, recipe: Path, cache: Path) -> subprocess.Popen[bytes]:
    """A new run or, if the folder exists, the rest of it."""
    new = [str(recipe), "--run", str(run)]
    arguments = ["--resume", str(run)] if (run / "config.toml").exists() else new
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
    }  # fmt: skip
    log = (run.parent / f"{run.name}.log").open("ab")
    return subprocess.Popen(
        [sys.executable, "-m", "gesso", "train", *arguments],
        env=environment, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip


def finished(process: subprocess.Popen[bytes], run: Path) -> None:
    log = run.parent / f"{run.name}.log"
    assert process.wait(400) == 0, log.read_text()[-2000:]


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


def result(run: Path) -> tuple[list[dict], dict[str, bytes]]:
    """Rows without timings, and all files of the last checkpoint."""
    folder = RunFolder(run)
    rows = [
        {k: v for k, v in row.items() if not k.startswith(NOT_REPEATED)} for row in folder.rows()
    ]
    last = sorted((run / "checkpoints").iterdir())[-1]
    return rows, {file.name: file.read_bytes() for file in last.glob("*.safetensors")}


@pytest.fixture(scope="module")
def first_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every model twice, all at once, each process with an empty cache."""
    base = tmp_path_factory.mktemp("runs")
    prompts = base / "prompts.txt"
    prompts.write_text("a red kite\na blue sign in the wind\nan oak\n")
    folders, processes = {}, {}
    for name in KINDS:
        folders[name] = base / name
        folders[name].mkdir()
        file = recipe(name, folders[name], prompts)
        for run in ("a", "b"):
            path = folders[name] / run
            processes[path] = started(path, file, folders[name] / f"cache-{run}")
    for path, process in processes.items():
        finished(process, path)
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

    def killed(name: str, moment: int) -> Path:
        folder = first_runs[name]
        run, rest = folder / f"killed-{moment}", (folder / "recipe.toml", folder / "cache-a")
        kill_after(started(run, *rest), run, *MOMENTS[moment])
        finished(started(run, *rest), run)
        return run

    cases = [("sd35", i) for i in range(5)] + [(name, 2) for name in KINDS if name != "sd35"]
    with ThreadPoolExecutor(len(cases)) as pool:
        return dict(zip(cases, pool.map(lambda case: killed(*case), cases), strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_killed_and_resumed(
    name: str, first_runs: dict[str, Path], killed_runs: dict[tuple[str, int], Path]
) -> None:
    expected = result(first_runs[name] / "a")
    for (kind, moment), run in killed_runs.items():
        if kind == name:
            assert result(run) == expected, f"killed at {MOMENTS[moment]}"

"""Measures separate samplers on a CPU: how fast weights travel, and how much of a step overlaps.

    python benchmarks/separate_samplers.py weights [--gb 1]
    python benchmarks/separate_samplers.py overlap [--steps 8] [--recipe demo SETTING …]
    python benchmarks/separate_samplers.py partial [--steps 16]

`weights`: one learner and one sampler, gloo over loopback; the digests of both sides are timed
apart. `overlap`: one learner and one sampler, with lag 0 and 1; a step against the longer of its
two phases. Each has a thread and a core of its own, the driver and a cheap reward share them.
`partial`: the same with a tiny language model of random weights, whose responses differ widely in
length, with and without `partial`. Needs two idle cores.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: libraries of kernels read it once

import gesso  # sets how OpenMP threads wait  # noqa: F401

# isort: split
import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed

from gesso import build, run
from gesso.cluster import workers
from gesso.cluster.placement import Placement
from gesso.cluster.processes import Child, Processes
from gesso.cluster.transfer import Transfers
from gesso.cluster.workers import start
from gesso.config import Recipe
from gesso.track.progress import Progress
from tests import tokens

BALANCED = ["data.groups=6", "algorithm.updates=1", "sampler.batch=24"]
CHEAP = [{"name": "jpeg-compressibility"}]
ROUNDS = 5


def weights_of(gigabytes: float, rank: int) -> dict[str, torch.Tensor]:
    """As of a transformer: matrices of 64 MB, and 200 small tensors."""
    shapes = [(4096, 4096)] * max(1, round(gigabytes * 1e9 / 4096**2 / 4)) + [(4096,)] * 200
    generator = torch.Generator().manual_seed(rank)
    return {f"{i:04d}": torch.rand(shape, generator=generator) for i, shape in enumerate(shapes)}


def _rank(rank: int, store: str, gigabytes: float) -> None:
    torch.set_num_threads(1)
    joint = distributed.FileStore(store, 2)
    distributed.init_process_group("gloo", store=joint, rank=rank, world_size=2)
    transfers = Transfers.open(rank, torch.device("cpu"), 1, 2, joint, timedelta(minutes=5))
    copies = {"current": weights_of(gigabytes, rank)}
    seconds: list[float] = []
    for _ in range(ROUNDS + 1):  # the first one is not counted
        distributed.barrier()
        started = time.perf_counter()
        move = transfers.receive_weights if rank else transfers.send_weights
        found = move(copies).answer()  # type: ignore[arg-type]
        seconds.append(found["seconds"])
        total = time.perf_counter() - started
    if rank == 1:
        size, taken = found["bytes"] / 1e9, median(seconds[1:])
        print(f"{size:.2f} GB in {taken:.2f} s: {size / taken:.2f} GB/s (aim 1)")
        print(f"with the digests of both sides: {total:.2f} s", flush=True)
    print(f"digest of rank {rank}: {found['digest']}", flush=True)
    distributed.barrier()


def measure_weights(gigabytes: float) -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [context.Process(target=_rank, args=(r, store, gigabytes)) for r in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


def pin(processes: Processes) -> None:
    """Every worker to a core of its own, with all threads that it has."""
    cores = sorted(os.sched_getaffinity(0))
    for worker in processes.workers:
        assert isinstance(worker, Child)
        for thread in Path(f"/proc/{worker.process.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {cores[worker.rank % len(cores)]})


def start_pinned(recipe: Recipe, placement: Placement, progress: Progress) -> Processes:
    processes = start(recipe, placement, progress)
    pin(processes)
    return processes


def measure_overlap(name: str, settings: Sequence[str], steps: int) -> None:
    workers.start = start_pinned
    print("| lag | sample s | update s | step s | of the longer phase | aim |")
    print("|---|---|---|---|---|---|")
    for lag in (0, 1):
        common = [f"steps={steps}", f"lag={lag}", "eval.every=0", "eval.prompts=1", "save.every=99"]
        cluster = ["cluster.workers=1", "cluster.samplers=1"]
        chosen = build.recipe(name, [*common, *cluster, *settings]).model_dump()
        recipe = build.recipe_from(chosen | {"reward": CHEAP, "eval_reward": []})
        with tempfile.TemporaryDirectory() as folder:
            done = run.train(recipe, folder=Path(folder) / "run", quiet=True)
            rows = done.rows()[2:-1]  # the first loads kernels, the last evaluates
        sample, update, step = (
            median(row[f"time/{name}"] for row in rows) for name in ("sample", "update", "step")
        )
        ratio = median(
            row["time/step"] / max(row["time/sample"], row["time/update"]) for row in rows
        )
        aim = "1.1" if lag else ""
        times = f"{sample:.2f} | {update:.2f} | {step:.2f}"
        print(f"| {lag} | {times} | {ratio:.2f} | {aim} |", flush=True)


def measure_partial(steps: int) -> None:
    """Sampling is the longer phase. The first steps wait for `lag` batches and are not counted."""
    workers.start = start_pinned
    print("| lag | partial | tokens: mean, max | sample s | update s | step s | age of a token |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens.build("qwen2", folder / "model")
        (folder / "prompts.txt").write_text("".join(f"count to {i}\n" for i in range(32)))
        for lag in (2, 4):
            for partial in (False, True):
                recipe = build.recipe_from(long_tailed(folder, steps, lag, partial))
                done = run.train(recipe, folder=folder / f"{lag}{partial}", quiet=True)
                rows = done.rows()[lag + 2 : -1]
                mean, sample, update, step = (
                    median(row[key] for row in rows)
                    for key in ("response/length", "time/sample", "time/update", "time/step")
                )
                longest = max(row["response/max_length"] for row in rows)
                age = median(row["age/mean"] if partial else row["age"] for row in rows)
                times = f"{sample:.2f} | {update:.2f} | {step:.2f} | {age:.2f}"
                print(f"| {lag} | {partial} | {mean:.0f}, {longest:.0f} | {times} |", flush=True)


def long_tailed(folder: Path, steps: int, lag: int, partial: bool) -> dict[str, Any]:
    """32 prompts × 4 responses of up to 128 tokens; a batch has room for as many others."""
    prompts = str(folder / "prompts.txt")
    return {
        "steps": steps,
        "lag": lag,
        "partial": partial,
        "model": {"name": "causal", "path": str(folder / "model"), "device": "cpu"},
        "data": {"train": prompts, "eval": prompts, "groups": 32},
        "algorithm": {"name": "grpo", "group": 4, "max_tokens": 128},
        "reward": [{"name": "tests.token_rewards:early"}],
        "optimizer": {"lr": 1e-6},  # lengths stay as they are
        "sampler": {"batch": 256},
        "eval": {"every": 0, "prompts": 1},
        "save": {"every": 99},
        "cluster": {"workers": 1, "samplers": 1},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["weights", "overlap", "partial"])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--recipe", nargs="+", default=["demo", *BALANCED])
    options = parser.parse_args()
    if options.what == "weights":
        measure_weights(options.gb)
    elif options.what == "partial":
        measure_partial(options.steps)
    else:
        measure_overlap(options.recipe[0], options.recipe[1:], options.steps)


if __name__ == "__main__":
    main()

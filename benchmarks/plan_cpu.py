"""Holds `gesso plan --measure` against real steps of 1, 2 and 4 worker processes on a CPU.

    setsid -w python benchmarks/plan_cpu.py [--recipes demo demo-vlm] [--rounds 4] [--boost]

All numbers of workers are kept open and take turns, with a thread each. Needs idle cores; with
`--boost` (Linux, root) the processes of a step get priority over other programs while it lasts.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: libraries of kernels read it once

import gesso  # sets how OpenMP threads wait  # noqa: F401

# isort: split
import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from unittest.mock import patch

import torch

from gesso import build
from gesso.cluster.processes import Child
from gesso.cluster.workers import Workers
from gesso.config import Recipe
from gesso.plan import measure
from gesso.plan.planner import divided
from gesso.plan.simulate import simulate
from gesso.run import Assembled, assemble
from gesso.timeline.steps import Step

SETTINGS = {
    "demo": ['reward=[{name="jpeg-compressibility"}]'],
    "demo-vlm": ["learner.micro_tokens=2048"],
}
COUNTS = (1, 2, 4)


@contextmanager
def boosted(pids: Sequence[int]) -> Iterator[None]:
    """Linux schedules sessions; each of these processes leads one."""
    for pid in pids:
        Path(f"/proc/{pid}/autogroup").write_text("-20")
    try:
        yield
    finally:
        for pid in pids:
            Path(f"/proc/{pid}/autogroup").write_text("0")


def children(job: Assembled) -> list[int]:
    assert isinstance(job.cluster, Workers)
    workers = job.cluster.processes.workers
    return [worker.process.pid for worker in workers if isinstance(worker, Child)]


def iterate(job: Assembled, step: int, boost: bool) -> Step:
    with boosted([os.getpid(), *children(job)] if boost else []):
        return measure._step(job, step)


def measured_rates(recipe: Recipe, boost: bool) -> measure.Measured:
    step = measure._step

    def boosted_step(job: Assembled, number: int) -> Step:
        with boosted(children(job) if boost else []):
            return step(job, number)

    usual = patch.object(measure, "_fastest", lambda work: median(work() for _ in range(5)))
    watched = patch.object(measure, "_step", boosted_step)
    with boosted([os.getpid()] if boost else []), usual, watched:
        found = measure.measure(recipe)
    print(found, flush=True)
    return found


def speed() -> float:
    """Of this core now: matrix multiplications per second of CPU time."""
    matrix, count, started = torch.ones(256, 256), 0, time.process_time()
    while time.process_time() - started < 0.05:
        matrix @ matrix
        count += 1
    return count / (time.process_time() - started)


def compare(name: str, rounds: int, boost: bool) -> list[str]:
    """Rates are measured before and after the steps, as a shared machine changes its speed."""
    recipe = build.recipe(name, SETTINGS[name])
    jobs: dict[int, Assembled] = {}
    steps: dict[int, list[Step]] = {count: [] for count in COUNTS}
    found = [measured_rates(recipe, boost)]
    sized = {count: divided(recipe, count, found[0].longest) for count in COUNTS}
    try:
        for count in COUNTS:
            cluster = sized[count].cluster.model_copy(update={"workers": count})
            jobs[count] = assemble(sized[count].model_copy(update={"cluster": cluster}))
        for step in range(rounds + 1):
            for count, job in jobs.items():
                steps[count].append(iterate(job, step, boost))
                print(step, count, steps[count][-1].seconds, round(speed()), flush=True)
    finally:
        for job in jobs.values():
            job.close()
    found.append(measured_rates(recipe, boost))
    lines = ["| workers | predicted s | measured s | of it |", "|---|---|---|---|"]
    for count in COUNTS:
        predicted = [
            simulate(sized[count], count, m.rates_of(sized[count], count), m.longest).step
            for m in found
        ]
        real, mean = median(step.seconds for step in steps[count][1:]), fmean(predicted)
        lines.append(f"| {count} | {mean:.2f} | {real:.2f} | {mean / real:.2f} |")
        near = min(steps[count], key=lambda step: abs(step.seconds - real))
        print(lines[-1], predicted, dict(near.busy), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--boost", action="store_true")
    options = parser.parse_args()
    for name in options.recipes:
        lines = compare(name, options.rounds, options.boost)
        print(f"\n`{name} {' '.join(SETTINGS[name])}`\n", *lines, sep="\n")


if __name__ == "__main__":
    main()

"""Holds `gesso plan --measure` against real steps of 1, 2 and 4 worker processes on a CPU.

    python benchmarks/plan_cpu.py [--recipes demo demo-vlm] [--rounds 5]

All workers are kept open, with a thread each. In every round, rates are measured and each number of
workers takes a step, since a shared machine changes its speed within minutes. Needs idle cores.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: libraries of kernels read it once

import gesso  # sets how OpenMP threads wait  # noqa: F401

# isort: split
import argparse
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median

import torch

from gesso import build, clock
from gesso.config import Cluster, Recipe
from gesso.plan.measure import Measured, Meter
from gesso.plan.planner import Planner, divided
from gesso.plan.simulate import Prediction, simulate
from gesso.run import Assembled, assemble
from gesso.timeline import recorder
from gesso.timeline.steps import Step

SETTINGS = {
    "demo": ['reward=[{name="jpeg-compressibility"}]'],
    "demo-vlm": ["learner.micro_tokens=2048"],
}
COUNTS = (1, 2, 4)
PHASES = {  # of real workers
    "encode": ("encode",), "sample": ("sample", "decode"), "update": ("update", "wait"),
    "exchange": ("exchange",), "publish": ("publish",),
}  # fmt: skip
SIMULATED = {  # the same of simulated ones
    "encode": ("open",), "sample": ("sample", "decode"), "update": ("update", "exchange"),
    "exchange": ("share",), "publish": ("publish",),
}  # fmt: skip


def iterate(job: Assembled, number: int) -> tuple[Step, float]:
    """A step of a run, and the peak memory of a worker in GB."""
    recorder.take()
    started = clock.seconds()
    batch = job.cluster.collect(number).result()
    update = job.cluster.update(batch, number)
    job.cluster.publish(number + 1)
    step = Step.of(number, 0.0, started, clock.seconds(), recorder.take())
    return step, update.metrics["memory/gb"]


def speed() -> float:
    """Of this core now: matrix multiplications per second of CPU time."""
    matrix, count, started = torch.ones(256, 256), 0, time.process_time()
    while time.process_time() - started < 0.05:
        matrix @ matrix
        count += 1
    return count / (time.process_time() - started)


def compare(name: str, rounds: int) -> list[str]:
    recipe = build.recipe(name, SETTINGS[name])
    meter = Meter(recipe)
    sized = {count: divided(recipe, count, meter.longest) for count in COUNTS}
    jobs: dict[int, Assembled] = {}
    steps: dict[int, list[Step]] = defaultdict(list)
    memory: dict[int, float] = defaultdict(float)
    try:
        for count in COUNTS:
            jobs[count] = assemble(
                sized[count].model_copy(update={"cluster": Cluster(workers=count)})
            )
            iterate(jobs[count], 0)  # allocates and connects
        for number in range(1, rounds + 1):
            meter.measure()
            for count, job in jobs.items():
                step, gigabytes = iterate(job, number)
                steps[count].append(step)
                memory[count] = max(memory[count], gigabytes)
                print(number, count, step.seconds, round(speed()), flush=True)
        measured = meter.result()
    finally:
        meter.close()
        for job in jobs.values():
            job.close()
    print(measured)
    planner = Planner(recipe, measured.rates_of, measured.longest, measured=measured.memory)
    lines = [
        "| workers | predicted s | measured s | of it | predicted GB | measured GB | of it |",
        "|---|---|---|---|---|---|---|",
    ]
    for count in COUNTS:
        found = predict(measured, sized[count], count)
        real = median(step.seconds for step in steps[count])
        gigabytes = planner.memory(sized[count], count)["worker"] / 1e9
        lines.append(
            f"| {count} | {found.step:.2f} | {real:.2f} | {found.step / real:.2f} | "
            f"{gigabytes:.2f} | {memory[count]:.2f} | {gigabytes / memory[count]:.2f} |"
        )
        print(lines[-1], "mean seconds of a worker, predicted and measured:")
        for phase in PHASES:
            simulated = mean_of_simulated(found, count, phase)
            print(f"    {phase:<9}{simulated:7.3f}{mean_of_real(steps[count], phase):7.3f}")
    return lines


def predict(measured: Measured, recipe: Recipe, count: int) -> Prediction:
    return simulate(recipe, count, measured.rates_of(recipe, count), measured.longest)


def mean_of_real(steps: Sequence[Step], phase: str) -> float:
    def seconds(row: Mapping[str, float]) -> float:
        return sum(row.get(name, 0.0) for name in PHASES[phase])

    return median(
        fmean(seconds(row) for name, row in step.busy.items() if name.startswith("worker"))
        for step in steps
    )


def mean_of_simulated(found: Prediction, count: int, phase: str) -> float:
    """With the time that workers wait for each other in an update, as in the real phase."""
    spans = [s for s in found.spans if s.rank >= 0 and s.phase in SIMULATED[phase]]
    if phase == "update" and spans:
        return max(s.end for s in spans) - min(s.start for s in spans)
    return sum(s.seconds for s in spans) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for name in options.recipes:
        lines = compare(name, options.rounds)
        print(f"\n`{name} {' '.join(SETTINGS[name])}`\n", *lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()

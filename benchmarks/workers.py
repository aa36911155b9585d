"""Measures worker processes on a CPU: one against none, two against one, a thread each.

    python benchmarks/workers.py [--recipes demo demo-vlm] [--rounds 5] [--out FOLDER]

All three are kept open and take turns, with the same recipe and prompts; the scores of a step are
equal to the bit. Needs two idle cores. On a machine whose speed varies the fastest steps are least
disturbed: two workers wait for the one that is slowed down.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: libraries of kernels read it once

import gesso  # sets how OpenMP threads wait  # noqa: F401

# isort: split
import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from gesso import build, run
from gesso.run import Assembled

SETTINGS = {
    "demo": [
        "sampler.batch=24",
        "learner.micro_batch=48",
        'reward=[{name="jpeg-compressibility"}]',
    ],
    "demo-vlm": ["sampler.batch=64", "learner.micro_tokens=1024"],
}
COUNTS = ("none", "1", "2")
AIMS = {"1": 1.03, "2": 1 / 1.7}  # of the time of the one before


@dataclass
class Side:
    job: Assembled
    sampling: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def iterate(self, step: int) -> None:
        started = time.perf_counter()
        batch = self.job.cluster.collect(step).result()
        sampled = time.perf_counter()
        self.job.cluster.update(batch, step)
        self.job.cluster.publish(step + 1)
        self.sampling.append(sampled - started)
        self.updates.append(time.perf_counter() - sampled)
        self.rewards += [score.value or 0.0 for score in batch.scores]


def measure(name: str, rounds: int) -> dict[str, Side]:
    sides: dict[str, Side] = {}
    try:
        for count in COUNTS:
            recipe = build.recipe(name, [*SETTINGS[name], f"cluster.workers={count}"])
            sides[count] = Side(run.assemble(recipe))
        for step in range(rounds + 1):  # the first one is not counted
            for side in sides.values():
                side.iterate(step)
    finally:
        for side in sides.values():
            side.job.close()
    return sides


def table(name: str, sides: dict[str, Side]) -> list[str]:
    lines = [
        f"`{name} {' '.join(SETTINGS[name])}`",
        "",
        "| workers | sample s | update s | total s | of the row above | range | fastest step s | "
        "of the row above | aim |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    before: list[float] = []
    for count, side in sides.items():
        sampling, updates = side.sampling[1:], side.updates[1:]
        totals = [a + b for a, b in zip(sampling, updates, strict=True)]
        cells = [f"{median(each):.2f}" for each in (sampling, updates, totals)]
        if before:
            ratios = sorted(a / b for a, b in zip(totals, before, strict=True))
            cells += [f"{median(ratios):.3f}", f"{ratios[0]:.3f} to {ratios[-1]:.3f}"]
            fastest = f"{min(totals) / min(before):.3f}"
        else:
            cells += [""] * 2
            fastest = ""
        cells += [f"{min(totals):.2f}", fastest, f"{AIMS[count]:.3f}" if before else ""]
        lines.append(f"| {' | '.join([count, *cells])} |")
        before = totals
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for workers.md")
    options = parser.parse_args(arguments)
    lines = ["# Worker processes on a CPU, one thread each", ""]
    for name in options.recipes:
        sides = measure(name, options.rounds)
        first, *others = sides.values()
        assert all(other.rewards == first.rewards for other in others), "rewards differ"
        lines += [*table(name, sides), ""]
    text = "\n".join(lines)
    print(text)
    if options.out is not None:
        (options.out / "workers.md").write_text(text, "utf-8")


if __name__ == "__main__":
    main()

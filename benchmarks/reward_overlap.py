"""Compares scoring that overlaps with sampling and scoring after it, with an equally slow reward.

    python benchmarks/reward_overlap.py [--rounds 7] [--json FILE] [key=value ...]

Uses the demo task. `slow` below waits like a remote server; scoring a batch takes as long as
sampling it. Streamed: each part of a batch is scored when it is sampled, as in training. Serial:
the whole batch is sampled, then scored. The two alternate.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any


def slow(samples: Sequence[Any], seconds: float) -> list[float]:
    time.sleep(seconds * len(samples))
    return [float(sample.pixels.mean()) / 255 for sample in samples]


def main() -> None:
    import gesso  # noqa: F401  before torch: sets how OpenMP threads wait

    # isort: split
    import argparse
    import json
    import os
    import platform
    from pathlib import Path
    from statistics import median

    import torch

    from gesso import build
    from gesso.run import Assembled, assemble

    here = Path(__file__).resolve().parent
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    )  # the worker imports this file

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()

    def job_with(seconds: float) -> Assembled:
        # Eight parts: with the demo's three, a third of the batch is sampled before scoring starts.
        pieces = ["sampler.batch=12"] if options.recipe == "demo" else []
        entry = f'reward=[{{name = "reward_overlap:slow", seconds = {seconds}, cache = false}}]'
        return assemble(build.recipe(options.recipe, [*pieces, *options.overrides, entry]))

    def streamed(job: Assembled, step: int) -> float:
        started = time.perf_counter()
        job.cluster.sample_step(step).result()
        return time.perf_counter() - started

    def serial(job: Assembled, step: int) -> tuple[float, float]:
        """Seconds of sampling, then of scoring."""
        service, held = job.cluster.rewards, []

        class Later:
            processes = 0

            def begin(self, groups: Any, held_out: bool = False, weights: Any = None) -> Any:
                return self

            def add(self, index: Any, samples: Any) -> None:
                held.append(samples)

        started = time.perf_counter()
        job.cluster.rewards = Later()  # type: ignore[assignment]
        job.cluster.sample_step(step)
        job.cluster.rewards = service
        drawn = time.perf_counter()
        scoring = service.begin(range(sum(len(samples) for samples in held)))
        first = 0
        for samples in held:
            scoring.add(range(first, first + len(samples)), samples)
            first += len(samples)
        scoring.result()
        return drawn - started, time.perf_counter() - drawn

    job = job_with(0.0)
    pictures = job.recipe.data.groups * job.algorithm.group
    for step in range(2):
        serial(job, step)
    sampling = median(serial(job, step)[0] for step in range(2, 5))
    job.close()
    job = job_with(sampling / pictures)
    try:
        streamed(job, 0), serial(job, 0)  # the worker starts
        rows = []
        for step in range(1, options.rounds + 1):
            sample, score = serial(job, 2 * step)
            rows.append((sample, score, streamed(job, 2 * step + 1)))
    finally:
        job.close()
    sample, score, stream = (median(column) for column in zip(*rows, strict=True))
    longer = max(sample, score)
    ratios = [t / max(a, b) for a, b, t in rows]
    print(
        f"{options.recipe}: {pictures} images per batch, {job.recipe.sampler.batch} per part, "
        f"{torch.get_num_threads()} torch threads, {platform.machine()}, torch {torch.__version__}"
    )
    print(f"sampling alone   {sample:6.2f} s\nscoring alone    {score:6.2f} s")
    print(
        f"serial           {sample + score:6.2f} s   {(sample + score) / longer:.2f} of the longer"
    )
    print(
        f"streamed         {stream:6.2f} s   {stream / longer:.2f} of the longer "
        f"(rounds {min(ratios):.2f} to {max(ratios):.2f})"
    )
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "ratio": stream / longer}, indent=1))


if __name__ == "__main__":
    main()

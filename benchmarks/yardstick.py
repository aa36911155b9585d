"""Measures the throughput of a published configuration and compares the shares of peak.

    python benchmarks/yardstick.py [--steps 2] [--batch 64] [--out FOLDER] [--tiny]

UniRL's table: SD3.5-M at 384², 48 prompts × 16 samples, 10 steps of which 3 are stochastic, 2
updates, PickScore, 8 × H20: 45.0 s per step, 7,680 samples per GPU-hour. Here: the same work on one
device without the reward, with random weights and synthetic scores. The table does not mention
guidance; with both branches it would exceed half of an H20's peak, so one branch is assumed.
"""

from __future__ import annotations

import gesso  # before torch: sets how OpenMP threads wait  # noqa: F401

# isort: split
import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # for tests, which import this file
from flow_iteration import matrix_peak
from flow_sides import MEDIUM, TINY, Ours, Shape, arithmetic, now, write_pipeline

from gesso.algorithms.flow_grpo_fast import FlowGRPOFast

PUBLISHED = 7680 / 3600  # samples per second and H20
H20 = 148e12  # FLOP/s, dense bfloat16
PROMPTS, GROUP = 48, 16
AIM = 1.5  # times the published share of peak


def algorithm() -> FlowGRPOFast:
    """Its defaults have three stochastic steps and no guidance."""
    return FlowGRPOFast(group=GROUP, updates=2, steps=10)


def measure(shape: Shape, samples: int, steps: int, device: torch.device) -> dict[str, float]:
    """Samples per second after a first step, which compiles."""
    with tempfile.TemporaryDirectory() as folder:
        write_pipeline(shape, Path(folder), device)
        ours = Ours.load(Path(folder), shape, device)
    learner = ours.learner(algorithm())
    sampling = updating = 0.0
    for step in range(steps + 1):
        started = now()
        rollout = ours.sample(learner.algorithm, samples)
        sampled = now()
        learner.update(replace(rollout, version=step), step)
        if step:
            sampling, updating = sampling + sampled - started, updating + now() - sampled
    return {
        "samples/s": samples * steps / (sampling + updating),
        "sampling s": sampling / steps,
        "update s": updating / steps,
        "peak": matrix_peak(device, ours.model.dtype),
    }


def report(shape: Shape, measured: dict[str, float]) -> dict[str, Any]:
    work = sum(arithmetic(shape, algorithm(), "ours"))  # of a sample
    share = measured["samples/s"] * work / measured["peak"]
    theirs = PUBLISHED * work / H20
    return measured | {
        "TFLOP per sample": work / 1e12,
        "share of peak": share,
        "published share of peak": theirs,
        "ratio": share / theirs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2, help="timed steps")
    parser.add_argument("--batch", type=int, default=64, help="images per pass")
    parser.add_argument("--out", type=Path, help="folder for yardstick.json")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, also on a CPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        parser.error("a model of SD3.5-M's size needs a CUDA device; --tiny runs on a CPU")
    shape = TINY if options.tiny else replace(MEDIUM, size=384, images=options.batch)
    samples = 2 * GROUP if options.tiny else PROMPTS * GROUP
    found = measure(shape, samples, options.steps, device)
    if not options.tiny:
        found = report(shape, found)
    for name, value in found.items():
        print(f"{name:<24} {value:.4g}")
    if not options.tiny:
        print(f"aim: a ratio of {AIM}; {'met' if found['ratio'] >= AIM else 'missed'}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "yardstick.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

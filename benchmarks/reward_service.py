"""Measures throughput and latency of a local reward service.

    python benchmarks/reward_service.py [--requests 1000] [--in-flight 16] [--size 512]

Starts `gesso serve-reward` on loopback and sends requests as a run would, one image per request:
new images, then the same images again (answered from the cache), then the same, one at a time.
Latency is from the image in memory to its score.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import quantiles

import numpy as np

from gesso.config import RemoteEntry
from gesso.rewards.transport.remote import RemoteScorer
from gesso.types import Prompt, Sample


def synthetic_samples(count: int, size: int) -> list[Sample]:
    """Smooth, as generated images are, and all different."""
    y, x = np.mgrid[0:size, 0:size] / size
    samples = []
    for i in range(count):
        waves = [np.sin(6 * (x * (c + 1) + y * (3 - c)) + i * 0.37) for c in range(3)]
        image = (127 + 120 * np.stack(waves, 2)).astype(np.uint8)
        image[0, 0] = (i % 256, i // 256 % 256, 7)
        samples.append(Sample(Prompt(f"picture {i}"), image, i))
    return samples


async def measure(url: str, samples: list[Sample], in_flight: int) -> dict[str, float]:
    remote = RemoteScorer(RemoteEntry(urls=[url], in_flight=in_flight, batch=1))
    seconds: list[float] = []
    waiting = iter(samples)

    async def caller() -> None:
        for sample in waiting:
            started = time.perf_counter()
            (score,) = await remote.score([sample])
            seconds.append(time.perf_counter() - started)
            assert score.ok, score.error

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(in_flight)))
    total = time.perf_counter() - started
    await remote.close()
    assert len(seconds) == len(samples)
    cuts = quantiles(seconds, n=100)
    return {"per_s": len(samples) / total, "p50_ms": 1e3 * cuts[49], "p99_ms": 1e3 * cuts[98]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reward", default="jpeg-compressibility")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--size", type=int, default=512, help="pixels per side")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    command = [sys.executable, "-m", "gesso.cli", "serve-reward", options.reward, "--port", "0"]
    server = subprocess.Popen(
        [*command, "--workers", str(options.workers)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout
        url = server.stdout.readline().rsplit(" ", 1)[1].strip()
        samples = synthetic_samples(options.requests, options.size)
        asyncio.run(measure(url, synthetic_samples(8, 64), 4))  # starts the reward's process
        rounds = [
            ("new pictures", options.in_flight, samples),
            ("the same again", options.in_flight, samples),
            ("the same, one at a time", 1, samples[: options.requests // 4]),
        ]
        print(
            f"{options.requests} requests of one {options.size}×{options.size} image, "
            f"{options.in_flight} in flight, {options.reward}, {options.workers} worker(s), "
            f"{platform.machine()}, Python {platform.python_version()}"
        )
        print(f"{'':<24}{'requests/s':>12}{'p50 ms':>10}{'p99 ms':>10}")
        figures = {}
        for name, in_flight, these in rounds:
            got = figures[name] = asyncio.run(measure(url, these, in_flight))
            print(f"{name:<24}{got['per_s']:>12.0f}{got['p50_ms']:>10.1f}{got['p99_ms']:>10.1f}")
        if options.json:
            options.json.write_text(json.dumps(vars(options) | figures, default=str, indent=1))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()

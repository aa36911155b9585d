"""Four demos cut to three steps, with and without lag: their rows and checkpoints, recorded.

A refactoring must leave every recorded number as it is, to the bit. Record anew, after a change
that is meant to move them, with `python -m tests.pinned.runs [NAME ...]`, and say so in
docs/log.md. Kernels round differently on other processors: there the comparison is a loose one.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gesso import run

RECIPES = ("demo", "demo-nft", "demo-vlm", "demo-vlm-ppo")
NAMES = [f"{recipe}-lag{lag}" for recipe in RECIPES for lag in (0, 1)]
UNREPEATABLE = ("time/", "memory/", "samples_per_s")


def record(name: str, folder: Path) -> dict[str, Any]:
    """Train, and return all that must not change."""
    recipe, _, lag = name.rpartition("-lag")
    settings = ["steps=3", "data.groups=2", "algorithm.group=4", "eval.prompts=4", "save.every=3"]
    settings += ["reward.0.workers=1", f"lag={lag}"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums of several threads are cut in other places
    try:
        trained = run.train(recipe, settings, folder / name, quiet=True)
    finally:
        torch.set_num_threads(threads)
    state, _ = trained.load(3)
    return {
        "rows": [
            {key: value for key, value in row.items() if not key.startswith(UNREPEATABLE)}
            for row in trained.rows()
        ],
        "tensors": _digests(state),
    }


def _digests(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Of every table of a checkpoint: names and values of its tensors."""
    tables: dict[str, Any] = {}
    for key, tensor in sorted(state.items()):
        digest = tables.setdefault(key.partition("/")[0], hashlib.sha256())
        digest.update(key.encode() + tensor.contiguous().numpy().tobytes())
    return {table: digest.hexdigest() for table, digest in tables.items()}


def machine() -> str:
    """What decides how sums are rounded."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), cpu)
    return f"{cpu}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def file_of(name: str) -> Path:
    return Path(__file__).parent / f"{name}.json"


if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            recorded = {"machine": machine()} | record(name, Path(folder))
        file_of(name).write_text(json.dumps(recorded, indent=1) + "\n")
        print(name)

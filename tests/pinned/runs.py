"""Four demos cut to three steps, two of them also with lag: their rows and checkpoints, recorded
on several kinds of machines.

A refactoring must leave every recorded number as it is, to the bit. Record anew, after a change
that is meant to move them, with `python -m tests.pinned.runs [NAME ...]`, and say so in
docs/log.md: this deletes the recordings of other machines, as they are outdated. `--add` keeps
them. Kernels round differently on other processors: there the comparison is a loose one.
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
from gesso.weights.history import PREFIX

NAMES = ["demo-lag0", "demo-lag1", "demo-nft-lag0", "demo-vlm-lag0", "demo-vlm-lag1"]
NAMES += ["demo-vlm-ppo-lag0"]
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
    """Of every table of a checkpoint, except earlier versions: names and values of its tensors."""
    tables: dict[str, Any] = {}
    for key, tensor in sorted(state.items()):
        if key.startswith(PREFIX):
            continue
        digest = tables.setdefault(key.partition("/")[0], hashlib.sha256())
        digest.update(key.encode() + tensor.contiguous().numpy().tobytes())
    return {table: digest.hexdigest() for table, digest in tables.items()}


def machine() -> str:
    """What decides how sums are rounded."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text().splitlines()
        named = [line for line in lines if line.startswith(("model name", "CPU part"))]
        cpu = next((line.split(":")[1].strip() for line in named), cpu)
    return f"{cpu}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def recorded(name: str) -> dict[str, dict[str, Any]]:
    """By machine."""
    return json.loads(_file_of(name).read_text())


def _file_of(name: str) -> Path:
    return Path(__file__).parent / f"{name}.json"


if __name__ == "__main__":
    add = "--add" in sys.argv
    for name in [word for word in sys.argv[1:] if word != "--add"] or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            new = {machine(): record(name, Path(folder))}
        machines = (recorded(name) if add else {}) | new
        _file_of(name).write_text(json.dumps(machines, indent=1) + "\n")
        print(name)

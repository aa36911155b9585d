"""Runs with worker processes, and the processes themselves."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

from gesso import build, run
from gesso.track.run_folder import RunFolder
from tests.test_loop import comparable, final_state
from tests.tokens import picture


def language_recipe(root: Path, algorithm: dict[str, Any]) -> dict[str, Any]:
    """3 prompts × 4 responses in batches of 2: 6 parts."""
    prompts = str(root / "prompts.txt")
    return {
        "steps": 3,
        "model": {"name": "causal", "path": str(root / "qwen2"), "device": "cpu"},
        "data": {"train": prompts, "eval": prompts, "groups": 3},
        "algorithm": {"group": 4, "max_tokens": 6, "updates": 2} | algorithm,
        "reward": [{"name": "tests.token_rewards:early"}],
        "optimizer": {"lr": 1e-2},
        "learner": {"micro_tokens": 60},
        "sampler": {"batch": 2},
        "eval": {"every": 2, "prompts": 3},
        "save": {"every": 1},
    }


def offline(data: dict[str, Any], root: Path, algorithm: dict[str, Any]) -> dict[str, Any]:
    """The recipe on samples of the data: responses, and images in files and in the rows."""
    image = root / "given.png"
    image.write_bytes(picture(32, 48).read())
    kind = "text" if data["model"].get("name") == "causal" else "image"
    rows = [
        {"prompt": f"number {i}", "chosen": str(image), "rejected": _base64(32, 48, i)}
        if kind == "image"
        else {"prompt": f"number {i}", "chosen": f"it is {i}"[: 6 + i], "rejected": "no"}
        for i in range(3)
    ]
    file = root / f"{kind}s.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampler = data["sampler"] | {"engine": "data"}
    given = {"data": data["data"] | {"train": str(file), "groups": 3}, "sampler": sampler}
    return data | given | {"algorithm": algorithm}


def _base64(height: int, width: int, seed: int) -> str:
    return base64.b64encode(picture(height, width, seed).read()).decode()


def go(data: dict[str, Any], folder: Path, count: int | None = None, **cluster: Any) -> RunFolder:
    changed = data | {"cluster": {"workers": count, **cluster}}
    return run.train(build.recipe_from(changed), folder=folder, quiet=True)


def without_cluster(rows: list[dict]) -> list[dict]:
    """Also without the number of cached scores, as a resumed run starts with an empty cache, and
    warnings about workers, which depend on the clock."""
    plain = [
        {k: value for k, value in row.items() if not k.startswith("cluster/") and k != "cached"}
        for row in comparable(rows)
    ]
    return [row | {"health": [w for w in row["health"] if "worker" not in w]} for row in plain]


def assert_equal(one: RunFolder, other: RunFolder) -> None:
    assert without_cluster(one.rows()) == without_cluster(other.rows())
    expected, state = final_state(one.path), final_state(other.path)
    assert state.keys() == expected.keys()
    assert [name for name in state if not torch.equal(state[name], expected[name])] == []


def listening(pid: int) -> set[str]:
    """The addresses at which a process accepts TCP connections, as hexadecimal digits."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in links:
                found.add(columns[1].partition(":")[0])
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter while it is read
        return False


def is_worker(pid: int) -> bool:
    return b"gesso.worker import" in Path(f"/proc/{pid}/cmdline").read_bytes()


def children_of(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]

"""Compares one iteration of a flow model of SD3.5-M's shape by Gesso and by a plain script.

    python benchmarks/flow_iteration.py [--rounds 3] [--out FOLDER] [--name flow]
        [--cases NAME ...] [--parts cold,cached,proof,rows] [--tiny]

Random weights of the real classes, 512², 10 steps, guidance 4.5, LoRA rank 32, a group of 16.
Before timing, both sides must give the same results; if they do not, the exit status is 1 and
nothing is timed. benchmarks/README.md explains the output.
"""

from __future__ import annotations

import gesso  # before torch: sets how OpenMP threads wait

# isort: split
import argparse
import datetime
import gc
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # for tests, which import this file
from flow_proof import prove
from flow_sides import (
    MEDIUM,
    PHASES,
    TINY,
    Ours,
    Shape,
    Theirs,
    Times,
    arithmetic,
    cases,
    now,
    write_pipeline,
)

from gesso.algorithms.base import Algorithm

SLACK = 2.0  # times the plain side's error against float32
FIRST_STEP = 90.0  # seconds
PARTS = ("cold", "cached", "proof", "rows")  # first step of new processes; same results; times


def say(text: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", flush=True)


def matrix_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix multiplication."""
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    rounds = 20 if device.type == "cuda" else 2
    a @ b
    started = now()
    for _ in range(rounds):
        a @ b
    return rounds * 2 * n**3 / (now() - started)


def counted(shape: Shape) -> tuple[float, float]:
    """Forward and backward FLOPs of a row by torch's counter on the meta device, without adapters;
    a test compares `flops` with it."""
    from diffusers import SD3Transformer2DModel
    from torch.utils.flop_counter import FlopCounterMode

    from gesso import config
    from gesso.weights.policy import Policy

    with torch.device("meta"):
        network = SD3Transformer2DModel(**shape.transformer)
        targets = ["attn.to_q", "attn.add_q_proj"]
        Policy(network, config.Lora(rank=1), targets, 0)
        side, model_config = shape.size // 8, network.config
        x, t = torch.empty(1, model_config.in_channels, side, side), torch.empty(1)
        text = torch.empty(1, shape.tokens[1], model_config.joint_attention_dim)
        pooled = torch.empty(1, model_config.pooled_projection_dim)
    totals = []
    with FlopCounterMode(display=False) as counter:
        out = network(x, text, pooled, t, return_dict=False)[0]
        totals.append(counter.get_total_flops())
        out.sum().backward()
        totals.append(counter.get_total_flops() - totals[0])
    return totals[0], totals[1]


class Memory:
    """Peak memory of one side, without what the other side has allocated."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}

    def loading(self, side: str, load: Callable[[], Any]) -> Any:
        before = allocated()
        network = load()
        self.held[side] = allocated() - before
        return network

    def peak(self, side: str, work: Callable[[], Any]) -> tuple[Any, float]:
        other = sum(held for name, held in self.held.items() if name != side)
        if not torch.cuda.is_available():
            return work(), 0.0
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        result = work()
        return result, (torch.cuda.max_memory_allocated() - other) / 1e9


def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def measure(
    name: str, algorithm: Algorithm, ours: Ours, theirs: Theirs, memory: Memory, rounds: int
) -> dict[str, Any]:
    """One row: alternates between the sides, the order is swapped every round. The first iteration
    of a side warms up, and compiles on our side; later ones must not compile anything."""
    learner = ours.learner(algorithm)
    first, metrics = ours.iteration(learner)
    gap = metrics.get("update/first_abs_dlogp_max")  # None if no step is scored again
    replay = "nothing replayed" if gap is None else f"replay gap {gap:.1e}"
    say(f"{name}: first iteration {first['total']:.1f} s, {replay}")
    graphs = compiled()
    times: dict[str, list[Times]] = {"ours": [], "plain": []}
    peaks = {"ours": 0.0, "plain": 0.0}
    for i in range(rounds + 1):  # round 0 warms up the plain side; ours is not counted either
        for side in ("plain", "ours") if i % 2 else ("ours", "plain"):
            work: Callable[[], Times] = (
                (lambda: ours.iteration(learner)[0])
                if side == "ours"
                else (lambda: theirs.iteration(algorithm))
            )
            taken, peak = memory.peak(side, work)
            peaks[side] = max(peaks[side], peak)
            if i:
                times[side].append(taken)
            say(f"{name}: {side} " + ", ".join(f"{p} {taken[p]:.3f}" for p in PHASES))
    return {
        "first": first,
        "gap": gap,
        "times": times,
        "peak_gb": peaks,
        "compiled_later": compiled() - graphs,
    }


def compiled() -> int:
    """Number of compiled graphs so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def table(rows: dict[str, Any], shape: Shape, peak: float) -> list[str]:
    head = (
        "| | sample s | decode s | update s | total s | images/s | of peak sampling | updating "
        "| peak GB | plain / ours |"
    )
    lines = [head, "|---" * 10 + "|"]
    for name, row in rows.items():
        totals = {}
        for side in ("plain", "ours"):
            work = arithmetic(shape, cases(shape.images)[name], side)
            middle = {p: median(t[p] for t in row["times"][side]) for p in PHASES}
            totals[side] = middle["total"]
            shares = [
                f"{shape.images * flop / middle[phase] / peak:.2f}" if flop else ""
                for flop, phase in zip(work, ("sample", "update"), strict=True)
            ]
            ratio = f"**{totals['plain'] / totals['ours']:.2f}**" if side == "ours" else ""
            seconds = " | ".join(f"{middle[p]:.2f}" for p in PHASES)
            lines.append(
                f"| {name}, {side} | {seconds} | {shape.images / middle['total']:.2f} | "
                f"{shares[0]} | {shares[1]} | {row['peak_gb'][side]:.1f} | {ratio} |"
            )
    return lines


def starting(folder: Path, shape: Shape, device: torch.device, began: float) -> dict[str, float]:
    """Seconds from the start of the process until the model is loaded and until the first step is
    done, and the difference between the first and the second step: mostly compilation."""
    ours = Ours.load(folder, shape, device)
    loaded = time.time() - began
    learner = ours.learner(cases(shape.images)["Flow-GRPO"])
    first = ours.iteration(learner)[0]["total"]
    stepped = time.time() - began
    compiling = first - ours.iteration(learner)[0]["total"]
    return {"loaded": loaded, "first step": stepped, "compiling": compiling}


def start_times(names: list[str], folder: Path, tiny: bool) -> dict[str, dict[str, float]]:
    """The first step of a new process, with an empty compile cache and with the one that the
    previous process filled."""
    times = {}
    for name in names:
        command = [sys.executable, __file__, "--start", str(time.time())]
        command += ["--folder", str(folder), *(["--tiny"] if tiny else [])]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        times[name] = json.loads(output.splitlines()[-1])
        say(f"new process, {name}: {times[name]}")
    return times


def circumstances(commit: str) -> dict[str, str]:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit_id = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    libraries = ("torch", "diffusers", "transformers", "peft")
    return {
        "date": f"{datetime.date.today()}",
        "hardware": f"{device}, {os.cpu_count()} cores",
        "versions": f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in libraries),
        "commit": commit or f"gesso {gesso.__version__} {commit_id}",
        "command": shlex.join(["python", *sys.argv]),
    }


def run(options: argparse.Namespace, folder: Path, device: torch.device) -> int:
    facts: dict[str, Any] = circumstances(options.commit)
    write_pipeline(options.shape, folder, device)
    say("weights written")
    starts = [part for part in ("cold", "cached") if part in options.parts]
    if starts:
        facts["first step after s"] = start_times(starts, folder, options.tiny)
    rows = compare(options, folder, device, facts) if {"proof", "rows"} & {*options.parts} else {}
    write(options, facts, rows)
    wrong = [] if facts.get("agree", True) else ["the results of both sides differ"]
    for name, row in rows.items():
        if row["compiled_later"]:
            wrong.append(f"{name}: {row['compiled_later']} graphs after the first iteration")
    for name, start in facts.get("first step after s", {}).items():
        if not options.tiny and start["first step"] > FIRST_STEP:
            wrong.append(f"{name}: the first step after {start['first step']:.0f} s")
    print("\n".join(wrong))
    return 1 if wrong else 0


def compare(
    options: argparse.Namespace, folder: Path, device: torch.device, facts: dict[str, Any]
) -> dict[str, Any]:
    """Checks that both sides agree, then measures row by row; adds the outcome to `facts`."""
    shape = options.shape
    memory = Memory()
    ours = memory.loading("ours", lambda: Ours.load(folder, shape, device))
    theirs = memory.loading("plain", lambda: Theirs.load(folder, ours))
    say("both sides loaded")
    agree = True
    if "proof" in options.parts:
        facts["proof"] = proof = proven(ours, theirs)
        facts["agree"] = agree = all(mine <= SLACK * floor for mine, floor in proof.values())
        print(f"results of both sides {'agree' if agree else 'DIFFER'}; error against float32:")
        for name, (mine, floor) in proof.items():
            print(f"  {name:<24} ours {mine:.1e}, plain {floor:.1e}")
    peak = matrix_peak(device, ours.model.dtype)
    facts["peak TFLOP/s"] = peak / 1e12
    rows: dict[str, Any] = {}
    timed = "rows" in options.parts and (agree or options.anyway)
    for name, algorithm in cases(shape.images).items() if timed else ():
        if wanted(name, options.cases):
            rows[name] = measure(name, algorithm, ours, theirs, memory, options.rounds)
            write(options, facts, rows)  # an interrupted run keeps its results
    print("\n".join(table(rows, shape, peak)))
    return rows


def proven(ours: Ours, theirs: Theirs) -> dict[str, tuple[float, float]]:
    torch.backends.cudnn.allow_tf32 = False  # the reference must be true float32
    try:
        return prove(ours, theirs)
    finally:
        torch.backends.cudnn.allow_tf32 = True  # torch's default, for the plain decoder


def wanted(name: str, requested: list[str]) -> bool:
    """Whether a row is requested, by its name or by a part of it that is not the name of a row."""
    rows = cases(1)
    return not requested or name in requested or any(a in name for a in requested if a not in rows)


def write(options: argparse.Namespace, facts: dict[str, Any], rows: dict[str, Any]) -> None:
    if options.out is None:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / options.name
    file.with_suffix(".json").write_text(json.dumps(facts | {"rows": rows}, indent=1))
    lines = table(rows, options.shape, 1e12 * facts["peak TFLOP/s"]) if rows else []
    header = [f"- {name}: {value}" for name, value in facts.items()]
    file.with_suffix(".md").write_text("\n".join([*header, "", *lines, ""]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for NAME.md and NAME.json")
    parser.add_argument(
        "--name", default="flow", help="of these files; an older result is replaced"
    )
    parser.add_argument("--cases", nargs="*", default=[], help="rows, by name or by a part of it")
    parser.add_argument("--commit", default="", help="name of the measured code")
    parser.add_argument(
        "--anyway", action="store_true", help="time the rows even if results differ"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run, in this order")
    parser.add_argument("--tiny", action="store_true", help="minutes on a CPU; not for times")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for part in options.cases:
        if not any(part in name for name in cases(1)):
            parser.error(f"--cases {part}: no row has this in its name; rows are {[*cases(1)]}")
    options.shape = TINY if options.tiny else MEDIUM
    options.parts = options.parts.split(",")
    if odd := set(options.parts) - {*PARTS}:
        parser.error(f"--parts {odd.pop()}: parts are {', '.join(PARTS)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.start is not None:
        print(json.dumps(starting(options.folder, options.shape, device, options.start)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/compiled"  # empty and private
        return run(options, Path(folder) / "pipeline", device)


if __name__ == "__main__":
    sys.exit(main())

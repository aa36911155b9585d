"""A long run over worker processes, with a fault every so many steps, beside an undisturbed one.

    python benchmarks/soak.py [--steps 1000] [--every 50] [--workers 4] [--samplers 0] [--fork]
                              [--out FILE]

A tiny language model. Faults, one after the other: a worker is killed, a worker is stopped for 10 s
(as by a network that stalls), a reward process is killed; in the middle of the run the driver is
killed and the run resumed. With --samplers these are in addition to the workers, which only train;
batches are sampled during updates (lag = 1), and a sampler is killed in turn. The undisturbed run
has no worker processes. Compared are all rows, all weights, and which samples each step was trained
on. Exits with 1 if anything differs, or if the memory of a process grows. With --fork workers are
forked from a process that has imported torch, for a busy machine: imports take most of a restart.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w

ROOT = Path(__file__).resolve().parent.parent
STALL = 10.0  # seconds
GROWTH = 0.03  # of a process's memory between the second and the last quarter of its life
STEADY = 40  # steps that a process must live for its memory to be compared
DIFFERENT = ("time/", "memory/", "samples_per_s", "cluster/", "cached", "health")
"""Metrics that faults and workers may change; "health" warns of idle workers."""
KILL_WORKER, STALL_WORKER, KILL_REWARD = "worker killed", "worker stopped 10 s", "reward killed"
KILL_DRIVER, KILL_SAMPLER = "driver killed", "sampler killed"
ROLES = ("driver", "worker", "sampler", "reward")
VICTIM = {KILL_WORKER: "worker", KILL_SAMPLER: "sampler", KILL_REWARD: "reward"}
LAST = 20_000  # bytes of metrics.jsonl, more than a row
SAMPLES = 4  # of a step


def recipe(folder: Path, steps: int) -> dict[str, Any]:
    """2 prompts × 2 responses in 4 parts."""
    prompts = str(folder / "prompts.txt")
    return {
        "steps": steps,
        "model": {"name": "causal", "path": str(folder / "model"), "device": "cpu"},
        "data": {"train": prompts, "eval": prompts, "groups": 2},
        "algorithm": {"name": "grpo", "group": 2, "max_tokens": 4, "kl": {"beta": 0.05}},
        "reward": [{"name": "tests.token_rewards:early"}],
        "optimizer": {"lr": 1e-4},
        "learner": {"micro_tokens": 50},
        "sampler": {"batch": 1},
        "eval": {"every": 0, "prompts": 4},
        "save": {"every": 10, "groups": 0},
    }


def train(folder: Path, fork: bool) -> None:
    """The driver: a new run, or the rest of one. Writes which samples it trains on, and the ids of
    its workers."""
    from gesso import build, run
    from gesso.cluster.channel import Channel
    from gesso.cluster.driver import Driver
    from gesso.cluster.processes import Processes, Worker
    from gesso.track.atomic import write_atomic
    from tests import forked

    honest, start = Driver.update, Processes._start

    def started(self: Processes, rank: int, environment: Any) -> Worker:
        worker: Any
        if fork:
            connection, life, pid = forked.worker()
            worker = Worker(rank, Channel(connection), life)
        else:
            worker = start(self, rank, environment)
            pid = worker.process.pid
        write_atomic(folder / f"worker-{rank}", str(pid).encode())
        return worker

    def update(self: Driver, batch: Any, step: int, *more: Any) -> Any:
        line = {"step": step, "samples": sorted([*zip(batch.group, seeds(batch), strict=True)])}
        with (folder / "trained.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return honest(self, batch, step, *more)

    setattr(Driver, "update", update)  # noqa: B010
    setattr(Processes, "_start", started)  # noqa: B010
    if (folder / "run").exists():
        run.resume(folder / "run", quiet=True)
    else:
        run.train(build.recipe(str(folder / "recipe.toml")), folder=folder / "run", quiet=True)


def seeds(batch: Any) -> list[str]:
    return [f"{sample.seed}: {sample.text}" for sample in batch.samples]


@dataclass
class Fault:
    kind: str
    step: int
    detected: float | None = None  # seconds until the log names it; None: no note is written
    recovered: float = 0.0  # seconds until the next step is complete
    repeated: int = 0  # steps


@dataclass
class Run:
    """A driver process, watched from here."""

    folder: Path
    options: argparse.Namespace
    memory: dict[tuple[str, int], list[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )  # (role, process) → step and bytes
    faults: list[Fault] = field(default_factory=list)
    driver: subprocess.Popen[bytes] = field(init=False)

    def begin(self) -> None:
        command = [
            sys.executable,
            __file__,
            "--train",
            str(self.folder),
            *["--fork"][not self.options.fork :],
        ]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.driver = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT)

    @property
    def step(self) -> int:
        """Of the last complete row; -1: there is none yet."""
        file = self.folder / "run" / "metrics.jsonl"
        if not file.exists():
            return -1
        with file.open("rb") as rows:
            rows.seek(max(0, file.stat().st_size - LAST))
            lines = rows.read().split(b"\n")
        return int(json.loads(lines[-2])["step"]) if len(lines) > 1 else -1

    def log(self) -> str:
        return (self.folder / "run" / "log.txt").read_text()

    def processes(self, role: str) -> list[int]:
        """Their ids."""
        if role == "driver":
            return [self.driver.pid]
        if role in ("worker", "sampler"):
            pids = [int(file.read_text()) for file in sorted(self.folder.glob("worker-*"))]
            learners = self.options.workers
            pids = pids[:learners] if role == "worker" else pids[learners:]
            return [pid for pid in pids if _resident(pid)]  # the run may go on without a sampler
        threads = Path(f"/proc/{self.driver.pid}/task").glob("*/children")
        pids = [int(pid) for thread in threads for pid in thread.read_text().split()]
        return [pid for pid in pids if b"rewards.transport.worker" in _command(pid)]

    def measure(self) -> None:
        step = self.step
        roles = [(role, pid) for role in ROLES for pid in self.processes(role)]
        for role, pid in roles:
            points = self.memory[role, pid]
            if (size := _resident(pid)) and (not points or points[-1][0] != step):
                points.append((step, size))

    def megabytes(self) -> dict[str, list[int]]:
        """Of the processes that run now, by role."""
        return {role: [_resident(pid) // 10**6 for pid in self.processes(role)] for role in ROLES}

    def reach(self, step: int) -> None:
        while self.step < step:
            if self.driver.poll() is not None:
                sys.exit(f"the driver ended with {self.driver.returncode} at step {self.step}")
            self.measure()
            time.sleep(0.1)

    def suffer(self, kind: str, choose: random.Random) -> None:
        time.sleep(choose.random())  # any moment of a step
        fault, written = Fault(kind, self.step), len(self.log())
        began = time.monotonic()
        if kind == KILL_DRIVER:
            self.driver.kill()
            self.driver.wait()
            self.begin()
        else:
            roles = [VICTIM[kind]] if kind in VICTIM else ["worker", "sampler"]
            pid = choose.choice([pid for role in roles for pid in self.processes(role)])
            with stopped(pid) if kind == STALL_WORKER else killed(pid):
                pass
        while not fault.recovered or (kind in (KILL_WORKER, KILL_SAMPLER) and not fault.detected):
            note = re.search(r" ended while (.*)\n", self.log()[written:])
            if note and fault.detected is None:
                fault.detected = time.monotonic() - began
                if repeated := re.search(r"repeat (\d+) steps", note[1]):
                    fault.repeated = int(repeated[1])
            if not fault.recovered and self.step > fault.step:
                fault.recovered = time.monotonic() - began
            if self.driver.poll() is not None:
                sys.exit(f"the driver ended with {self.driver.returncode} after: {kind}")
            time.sleep(0.02)
        self.faults.append(fault)
        print(fault, f"MB: {self.megabytes()}", flush=True)


@contextmanager
def killed(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGKILL)
    yield


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STALL)
    os.kill(pid, signal.SIGCONT)
    yield


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def growth(points: list[tuple[int, int]]) -> float | None:
    """Of its memory, from the second to the last quarter of its life; None: it was too short."""
    if len(points) < STEADY:
        return None
    quarter = len(points) // 4
    before = median(size for _, size in points[quarter : 2 * quarter])
    return median(size for _, size in points[-quarter:]) / before - 1


def trained(folder: Path) -> dict[int, Any]:
    """Step → its samples; a repeated step counts once, and must have had the same samples."""
    steps: dict[int, Any] = {}
    for line in (folder / "trained.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert steps.setdefault(row["step"], row["samples"]) == row["samples"], row["step"]
    return steps


def differences(one: Path, other: Path) -> list[str]:
    import torch

    from gesso.track.run_folder import RunFolder

    found = []
    runs = [RunFolder.open(folder / "run") for folder in (one, other)]
    for row, other_row in zip(*(run.rows() for run in runs), strict=True):
        keys = {k for k in {*row, *other_row} if not k.startswith(DIFFERENT)}
        if unequal := [k for k in sorted(keys) if row.get(k) != other_row.get(k)]:
            found.append(f"step {row['step']}: {', '.join(unequal)} differ")
            break
    if trained(one) != trained(other):
        found.append("the samples that were trained on differ")
    for step, samples in trained(one).items():
        if len({tuple(sample) for sample in samples}) != SAMPLES:
            found.append(f"step {step} was not trained on {SAMPLES} different samples")
    states = [run.load(run.latest() or 0)[0] for run in runs]
    if states[0].keys() != states[1].keys() or any(
        not torch.equal(states[0][name], states[1][name]) for name in states[0]
    ):
        found.append("the weights or the optimizer's state differ")
    return found


def report(disturbed: Run, problems: list[str], seconds: float, options: Any) -> list[str]:
    lines = ["| fault | times | detected after s, median, most | next step after s | repeated |"]
    lines += ["|---|---|---|---|---|"]
    for kind in dict.fromkeys(fault.kind for fault in disturbed.faults):
        some = [fault for fault in disturbed.faults if fault.kind == kind]
        noticed = [fault.detected for fault in some if fault.detected is not None]
        when = f"{median(noticed):.1f}, {max(noticed):.1f}" if noticed else "–"
        took = [fault.recovered for fault in some]
        steps = sum(fault.repeated for fault in some)
        lines.append(
            f"| {kind} | {len(some)} | {when} | {median(took):.1f}, {max(took):.1f} | {steps} |"
        )
    lines += ["", "| process | with a life of 40 steps or more | MB, most | growth, most |"]
    lines += ["|---|---|---|---|"]
    for role in ROLES:
        lives = [points for (name, _), points in disturbed.memory.items() if name == role]
        grown = [g for points in lives if (g := growth(points)) is not None]
        if grown:
            most = max(size for points in lives for _, size in points) / 1e6
            lines.append(f"| {role} | {len(grown)} | {most:.0f} | {max(grown):+.1%} |")
    apart = f" and {options.samplers} samplers" if options.samplers else ""
    done = f"{options.steps} steps over {options.workers} workers{apart}, "
    done += f"{len(disturbed.faults)} faults, "
    lines += ["", f"{done}{seconds / 60:.0f} min. " + ("; ".join(problems) or "No difference.")]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--samplers", type=int, default=0)
    parser.add_argument("--fork", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.train:
        return train(options.train, options.fork)
    from tests import tokens

    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        root, choose = Path(name), random.Random(0)
        tokens.build("qwen2", root / "model")
        questions = [f"what is {i} + {j}?" for i in range(5) for j in range(4)]
        (root / "prompts.txt").write_text("\n".join(questions))
        data, runs = recipe(root, options.steps) | {"lag": int(options.samplers > 0)}, []
        cluster = {"workers": options.workers, "restarts": options.steps}
        cluster |= {"samplers": options.samplers} if options.samplers else {}
        for kind, more in (("undisturbed", {}), ("disturbed", {"cluster": cluster})):
            (root / kind).mkdir()
            (root / kind / "recipe.toml").write_text(tomli_w.dumps(data | more))
            runs.append(Run(root / kind, options))
        undisturbed, disturbed = runs
        undisturbed.begin()
        undisturbed.reach(options.steps)
        undisturbed.driver.wait()
        started, moments = time.monotonic(), range(options.every, options.steps, options.every)
        disturbed.begin()
        for i, step in enumerate(moments):
            disturbed.reach(step)
            kinds = (KILL_WORKER, STALL_WORKER, *([KILL_SAMPLER][: options.samplers]), KILL_REWARD)
            kind = kinds[i % len(kinds)]
            disturbed.suffer(KILL_DRIVER if i == len(moments) // 2 else kind, choose)
        disturbed.reach(options.steps)
        disturbed.driver.wait()
        problems = differences(undisturbed.folder, disturbed.folder)
        for (role, pid), points in disturbed.memory.items():
            if (grown := growth(points)) is not None and grown > GROWTH:
                problems.append(f"the memory of {role} {pid} grew by {grown:.1%}")
        lines = report(disturbed, problems, time.monotonic() - started, options)
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()

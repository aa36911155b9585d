"""Trains recipes over several seeds and an untrained control; prints a table and plots curves.

    python benchmarks/learning.py --out runs/learning            # runs that are missing
    python benchmarks/learning.py --out runs/learning --images docs/images
    python benchmarks/learning.py --out runs/algorithms --arms control demo-grpo … --seeds 0 1
    python benchmarks/learning.py --out runs/responses --arms control-vlm demo-vlm demo-vlm-ppo …
    python benchmarks/learning.py --out runs/new --arms demo demo-awm --parallel 8 --set steps=30

Every arm is `gesso train RECIPE seed=S …` in its own process; an interrupted run is resumed. With
`--parallel N`, N runs at a time have two cores each. A control has learning rate 0 and fewer steps:
its weights cannot change. The last column has the seconds of sampling, scoring and updating until
the first evaluation at which a run is as good as the mean of `demo` at its end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import queue
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gesso.config import tables
from gesso.track.console import held_out_key

CONTROLS = {
    "control": ["demo", "optimizer.lr=0.0", "steps=10"],
    "control-vlm": ["demo-vlm", "optimizer.lr=0.0", "steps=5"],
    "control-edit": ["demo-edit", "optimizer.lr=0.0", "steps=2"],
    "control-video": ["demo-video", "optimizer.lr=0.0", "steps=2"],
}
ARMS = CONTROLS | {name: [name] for name in tables.bundled_recipes() if name.startswith("demo")}
COLOURS = dict.fromkeys(ARMS, "#888888") | {
    "demo": "#1f5fbf",
    "demo-grpo": "#1f5fbf",
    "demo-nft": "#c9771a",
    "demo-fast": "#2a8f5d",
    "demo-dance": "#b0368f",
    "demo-guard": "#7a52c7",
    "demo-mix": "#4fa3c7",
    "demo-dppo": "#b33a3a",
    "demo-gdpo": "#8a7a1f",
    "demo-awm": "#b33a3a",
    "demo-dgpo": "#c9771a",
    "demo-dpo": "#2a8f5d",
    "demo-rft": "#8a7a1f",
    "demo-flash": "#b0368f",
    "demo-tempflow": "#7a52c7",
    "demo-sft": "#b33a3a",
    "demo-dpo-offline": "#c9771a",
    "demo-distil": "#2a8f5d",
    "demo-vlm": "#1f5fbf",
    "demo-vlm-ppo": "#c9771a",
    "demo-vlm-rloo": "#2a8f5d",
    "demo-vlm-remax": "#b0368f",
    "demo-vlm-reinforce": "#7a52c7",
    "demo-vlm-dapo": "#4fa3c7",
    "demo-vlm-gspo": "#b33a3a",
    "demo-vlm-cispo": "#8a7a1f",
    "demo-vlm-sapo": "#d2558a",
    "demo-vlm-sft": "#b33a3a",
    "demo-vlm-dpo": "#c9771a",
    "demo-vlm-distil": "#2a8f5d",
    "demo-vlm-dr-grpo": "#3a3a3a",
    "demo-vlm-rloo-tokens": "#7fbf7f",
    "demo-vlm-reinforce-baseline": "#c0a5e8",
}


def run_arm(arm: str, seed: int, out: Path, more: Sequence[str], cores: str) -> None:
    """Trains one run unless it is complete. `cores`: those that it may use, "" for all."""
    folder = out / f"{arm}-seed{seed}"
    if complete(folder):
        return
    if (folder / "config.toml").exists():
        what = ["--resume", str(folder)]
    else:
        recipe, *own = ARMS[arm]
        what = [recipe, f"seed={seed}", *more, *own, "--run", str(folder)]
    print(f"==> gesso train {' '.join(what)}", flush=True)
    pinned = ["taskset", "-c", cores] if cores else []
    command = [*pinned, sys.executable, "-m", "gesso.cli", "train", *what, "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL if cores else None)


def run_all(arms: Sequence[str], seeds: Sequence[int], out: Path, options: Any) -> None:
    slots: queue.Queue[str] = queue.Queue()
    for i in range(options.parallel):
        slots.put(f"{2 * i},{2 * i + 1}" if options.parallel > 1 else "")

    def run(job: tuple[int, str]) -> None:
        cores = slots.get()
        try:
            run_arm(job[1], job[0], out, options.set, cores)
        finally:
            slots.put(cores)

    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(run, itertools.product(seeds, arms)))


def complete(folder: Path) -> bool:
    config = folder / "config.toml"
    return config.exists() and rows_of(folder)[-1]["step"] == tables.read_toml(config)["steps"]


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def held_out(rows: list[dict]) -> list[tuple[dict, float]]:
    """Rows with an evaluation, and the metric that is compared."""
    key = held_out_key(rows[0])
    return [(row, row[key]) for row in rows if key in row]


def table(results: dict[str, dict[int, list[dict]]]) -> str:
    ends = [held_out(rows)[-1][1] for rows in results.get("demo", {}).values()]
    level = statistics.fmean(ends) if ends else math.inf
    reached = f"seconds to {level:.3f}" if ends else ""
    head = ["arm", "seed", "before", "after", "change", "steps", "seconds", reached]
    lines = [f"| {' | '.join(head)} |", "|---|" + 7 * "---|"]
    for arm, by_seed in results.items():
        changes = []
        for seed, rows in by_seed.items():
            before, *_, after = [value for _, value in held_out(rows)]
            changes.append(after - before)
            lines.append(
                f"| {arm} | {seed} | {before:.3f} | {after:.3f} | {after - before:+.3f} "
                f"| {rows[-1]['step']} | {rows[-1]['time/total']:.0f} | {until(rows, level)} |"
            )
        mean = f"**{statistics.fmean(changes):+.3f}** (min {min(changes):+.3f})"
        lines.append(f"| **{arm}** | mean | | | {mean} | | | |")
    for control in CONTROLS.keys() & results.keys():
        befores = [held_out(rows)[0][1] for rows in results[control].values()]
        spread = max(befores) - min(befores)
        lines.append(f"\nSpread of {control} over its seeds: {spread:.3f}")
    return "\n".join(lines)


def spent(rows: list[dict], step: int) -> float:
    """Seconds of sampling, scoring and updating up to a step."""
    return sum(r["time/step"] - r.get("time/eval", 0.0) for r in rows if 0 < r["step"] <= step)


def until(rows: list[dict], level: float) -> str:
    """Seconds of training until the first evaluation that reaches a level."""
    steps = [row["step"] for row, value in held_out(rows) if value >= level]
    return f"{spent(rows, steps[0]):.0f}" if steps else ""


def plot(results: dict[str, dict[int, list[dict]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.9), sharey=True)
    for arm, by_seed in results.items():
        for i, rows in enumerate(by_seed.values()):
            evals = held_out(rows)
            for axis, x in zip(axes, ("step", "time/total"), strict=True):
                axis.plot(
                    [spent(rows, row["step"]) if x == "time/total" else row[x] for row, _ in evals],
                    [value for _, value in evals],
                    color=COLOURS[arm],
                    linewidth=1.3,
                    marker=".",
                    label=arm if i == 0 else None,
                )
    axes[0].set(xlabel="steps", ylabel="held-out exact match", ylim=(0, 1))
    axes[1].set(xlabel="seconds of training, without evaluation")
    axes[1].legend(frameon=False, fontsize=8, ncol=2, loc="lower right")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def sheet(run: Path, file: Path, count: int = 16) -> None:
    """The same prompts and seeds before and after training, in two columns of pairs."""
    from PIL import Image, ImageDraw, ImageFont

    steps = sorted(path for path in (run / "samples").iterdir() if path.is_dir())
    width, height, gap, head = 96 * 2, 32 * 2, 6, 22
    half = 2 * width + gap
    size = (2 * half + 5 * gap, head + (count // 2) * (height + gap) + gap)
    page = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(14)
    for column in range(2):
        for side, step in enumerate((steps[0], steps[-1])):
            x = gap + column * (half + 3 * gap) + side * (width + gap)
            draw.text((x, 3), f"step {int(step.name)}", fill="black", font=font)
            for row in range(count // 2):
                picture = Image.open(step / f"{row * 2 + column:03d}.png")
                y = head + row * (height + gap)
                page.paste(picture.resize((width, height), Image.Resampling.BICUBIC), (x, y))
    page.save(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--arms", nargs="+", choices=list(ARMS), default=["control", "demo", "demo-nft"]
    )
    parser.add_argument("--images", type=Path, help="folder for the curves and a sample sheet")
    parser.add_argument("--name", default="learning", help="file name of the curves")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, two cores each")
    parser.add_argument("--set", nargs="+", default=[], help="overrides of all runs")
    options = parser.parse_args()
    run_all(options.arms, options.seeds, options.out, options)
    results = {
        arm: {seed: rows_of(options.out / f"{arm}-seed{seed}") for seed in options.seeds}
        for arm in options.arms
    }
    print(table(results))
    if options.images:
        plot(results, options.images / f"{options.name}.png")
        if "demo" in results:
            sheet(options.out / f"demo-seed{options.seeds[0]}", options.images / "demo.png")


if __name__ == "__main__":
    main()

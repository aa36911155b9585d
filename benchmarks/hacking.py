"""Reward hacking, with and without brakes: the recipes demo-hack and demo-hack-braked.

    python benchmarks/hacking.py --out runs/hacking --seeds 0 1

Trains what is missing, 3 minutes or more per run on 2 cores. Writes hacking.json, the rows that
tests/test_hacking.py examines, and hacking.png, the figure of docs/how-to/diagnose.md: curves, and
the same prompts and seeds before training and at the end of both runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

RECIPES = {"demo-hack": "#b33a3a", "demo-hack-braked": "#2b6cb0"}
EXACT = "eval/ocr/exact"
LONGER = "reward/ocr-letters/longer"
KEPT = ("step", "reward", "reward/std", LONGER, "eval/reward", "eval/ocr", EXACT)
SHOWN = 6  # prompts in the figure


def rows_of(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in KEPT if key in row} for row in rows]


def train(recipe: str, seed: int, folder: Path) -> None:
    if not (folder / "report.html").exists():
        what = [recipe, f"seed={seed}", "--run", str(folder), "--quiet"]
        subprocess.run([sys.executable, "-m", "gesso.cli", "train", *what], check=True)


def plot(runs: dict[str, list[Path]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    figure = pyplot.figure(figsize=(10, 3.6))
    grid = figure.add_gridspec(SHOWN, 5, width_ratios=[3.2, 3.2, 2, 2, 2], hspace=0.1, wspace=0.4)
    trained, held_out = (figure.add_subplot(grid[:, column]) for column in (0, 1))
    for recipe, folders in runs.items():
        for i, folder in enumerate(folders):
            rows = rows_of(folder)
            for axis, key in ((trained, LONGER), (held_out, EXACT)):
                points = [(row["step"], row[key]) for row in rows if key in row]
                label = recipe if i == 0 else None
                axis.plot(*zip(*points, strict=True), color=RECIPES[recipe], label=label)
    trained.set(xlabel="steps", title="trained: too much text", ylim=(0, 1))
    held_out.set(xlabel="steps", title="held-out: read exactly", ylim=(0, 1))
    held_out.legend(frameon=False, fontsize=8)
    for axis in (trained, held_out):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(9)
    hacked, braked = (folders[0] for folders in runs.values())
    last = {each: sorted((each / "samples").glob("*/"))[-1] for each in (hacked, braked)}
    columns = {
        "before training": hacked / "samples" / "000000",
        "demo-hack": last[hacked],
        "demo-hack-braked": last[braked],
    }
    for column, (title, folder) in enumerate(columns.items(), 2):
        for row in range(SHOWN):
            axis = figure.add_subplot(grid[row, column])
            axis.imshow(Image.open(folder / f"{row:03d}.png"))
            axis.set_axis_off()
            if row == 0:
                axis.set_title(title, fontsize=9)
    figure.savefig(file, dpi=100, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/hacking"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    runs = {
        recipe: [options.out / f"{recipe}-seed{seed}" for seed in options.seeds]
        for recipe in RECIPES
    }
    for recipe, folders in runs.items():
        for seed, folder in zip(options.seeds, folders, strict=True):
            train(recipe, seed, folder)
            evaluated = [row for row in rows_of(folder) if EXACT in row]
            curve = "  ".join(f"{row['step']}: {row[EXACT]:.2f}" for row in evaluated)
            print(f"{recipe:<18} seed {seed}  held-out exact  {curve}")
    found = {recipe: [rows_of(folder) for folder in folders] for recipe, folders in runs.items()}
    (options.out / "hacking.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    plot(runs, options.out / "hacking.png")


if __name__ == "__main__":
    main()

"""Plots the losses logged by make_signs, by stage: `python -m tools.zoo.plot LOG.jsonl OUT.png`."""

import argparse
import json
from pathlib import Path


def plot_losses(log: Path, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    records = [json.loads(line) for line in log.read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    for stage in ("vae", "pretrain", "tune"):
        points = [(r["seconds"], r["loss"]) for r in records if r["stage"] == stage and "loss" in r]
        if points:
            axes.plot(*zip(*points, strict=True), ".-", markersize=3, linewidth=1, label=stage)
    axes.set(xlabel="seconds", ylabel="loss", yscale="log")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Plot the losses of a log by stage.")
    parser.add_argument("log", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    plot_losses(args.log, args.out)

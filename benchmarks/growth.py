"""Plots time and memory of an iteration against its sizes, 8 points each.

    python benchmarks/growth.py [--picture docs/images/growth.png] [--json FILE]

Seconds are CPU seconds of the process with one thread, so that other processes hardly matter.
Memory is the peak of the process so far; Gesso keeps freed memory, so sizes grow, and every line
has its own process. Scores are synthetic; responses do not end early.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from unscored import Iterations, iterations

from gesso.models.tokens.transformer import TransformerModel

RULES = 'reward=[{name="jpeg-compressibility"}]'  # loads no OCR model; scores are synthetic anyway


class Line(NamedTuple):
    recipe: str
    what: str
    sizes: Sequence[int]
    groups: int | None  # fixed; None: the prompts vary
    options: dict[str, Any]
    varies: str | None  # the algorithm's option that varies


LINES = [
    Line("demo", "prompts, 4 images each", range(1, 9), None, {"group": 4}, None),
    Line("demo", "images per prompt", range(2, 17, 2), 2, {}, "group"),
    Line("demo", "denoising steps, 8 images", range(6, 21, 2), 2, {"group": 4}, "steps"),
    Line(
        "demo-vlm",
        "tokens per response, 32 responses",
        range(8, 65, 8),
        8,
        {"group": 4},
        "max_tokens",
    ),
]


def point(once: Iterations, line: Line, size: int) -> tuple[float, float]:
    """CPU seconds and MB."""
    options = line.options | ({line.varies: size} if line.varies else {})
    once.resize(size if line.groups is None else line.groups, options)
    once()
    before = time.process_time()
    once()
    return time.process_time() - before, peak_mb()


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(line: Line) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    with iterations(line.recipe, [RULES] if line.recipe == "demo" else []) as once:
        if line.varies == "max_tokens":
            assert isinstance(once.job.model, TransformerModel)
            once.job.model.end = frozenset()
        seconds, mb = zip(*(point(once, line, size) for size in line.sizes), strict=True)
    return {"sizes": list(line.sizes), "seconds": list(seconds), "mb": list(mb)}


def straight(xs: Sequence[float], ys: Sequence[float]) -> float:
    """R² of a straight line through the points."""
    x, y = torch.tensor([xs, ys], dtype=torch.float64)
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1] ** 2)


def draw(results: dict[str, dict[str, list[float]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes: Any
    figure, axes = pyplot.subplots(2, len(results), figsize=(3.2 * len(results), 5), squeeze=False)
    for column, (name, points) in enumerate(results.items()):
        for row, (key, label) in enumerate((("seconds", "seconds"), ("mb", "MB"))):
            axis = axes[row][column]
            axis.plot(points["sizes"], points[key], "o-", markersize=4)
            axis.set_ylim(bottom=0)
            axis.set_xlabel(name if row else "")
            axis.set_ylabel("" if column else label)
            axis.grid(alpha=0.3)
        axes[0][column].set_title(f"R² {straight(points['sizes'], points['seconds']):.3f}", size=9)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path, default=Path("docs/images/growth.png"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, list[float]]] = {}
    for line in LINES:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            points = results[line.what] = process.submit(measured, line).result()
        print(line.what, {key: [round(x, 2) for x in points[key]] for key in points}, flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    draw(results, options.picture)


if __name__ == "__main__":
    main()

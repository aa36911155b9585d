"""Measures how long `gesso view` takes to open a large run: 10,000 rows of metrics, 5,000 images.

    python benchmarks/view_open.py [--rounds 3] [--side 256] [--keep FOLDER]

Creates the run folder (always the same, in a temporary folder unless --keep names one); for every
round and view it starts a new server and opens the view in a new tab of Chromium. The time is
measured in the page, from the start of navigation until the main content is painted. Runs: the
table. Evolution: all images visible without scrolling. Curves: the first chart's line. The limit is
2 s; the exit status is 1 if a median exceeds it. CPU seconds of server and browser are printed as
well; on a busy machine they are more reliable.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.viewer.browser import Browser, find  # noqa: E402

STEPS, EVERY, PROMPTS = 9_999, 101, 50  # 10,000 rows; 100 evaluations of 50 images
BAR = 2.0  # seconds
VIEWS = {
    "runs": "document.querySelector('tr[data-run]')",
    "evolution": "document.querySelector('.card') && [...document.querySelectorAll('.card')]"
    ".filter((c) => c.getBoundingClientRect().top < innerHeight)"
    ".every((c) => c.querySelector('img')?.complete)",
    "curves": "document.querySelector('[data-key=reward] .line .mean')",
}
FIGURES = (
    "reward/ocr", "reward/ocr/exact", "reward/std", "reward/max", "reward/at_max", "failed",
    "diversity", "update/ratio", "update/clipped", "update/kl", "update/abs_dlogp",
    "update/abs_dlogp_max", "update/grad_norm", "update/lr", "advantage/abs_mean",
    "advantage/flat_groups", "time/update", "time/sample", "time/score", "time/wait",
    "samples_per_s", "memory/peak_gb",
)  # fmt: skip


def make(run: Path, side: int) -> None:
    """Writes a run folder as a run does."""
    run.mkdir(parents=True)
    (run / "config.toml").write_text(
        f'about = "large"\nseed = 0\nsteps = {STEPS}\n[model]\nname = "sd3"\npath = "large"\n'
        '[data]\ngroups = 8\n[algorithm]\nname = "flow-grpo"\ngroup = 12\n'
    )
    rows = [json.dumps(_row(step)) for step in range(STEPS + 1)]
    (run / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    for step in range(0, STEPS + 1, EVERY):
        _evaluation(run / "samples" / f"{step:06d}", step, side)


def _row(step: int) -> dict[str, object]:
    rise = 1 - math.exp(-step / 2_500)
    shake = math.sin(step * 12.9898) * 0.1
    row: dict[str, object] = {"step": step, "time/step": 3.0, "time/total": 3.0 * (step + 1)}
    if step:
        row["reward"] = 0.3 + 0.5 * rise + shake
        row |= {key: abs(rise / (i + 1) + shake / (i + 2)) for i, key in enumerate(FIGURES)}
    if step % EVERY == 0:
        row |= {"eval/reward": 0.3 + 0.55 * rise, "eval/ocr": 0.3 + 0.55 * rise, "time/eval": 9.0}
    return row | {"health": []}


def _evaluation(folder: Path, step: int, side: int) -> None:
    from PIL import Image

    folder.mkdir(parents=True)
    ground = Image.linear_gradient("L").resize((side, side))
    lines = []
    for i in range(PROMPTS):
        shade = Image.new("L", (side, side), (40 * i + step) % 256)
        image = Image.merge("RGB", (ground, shade, ground.rotate(90 * (i % 4))))
        image.save(folder / f"{i:03d}.png", compress_level=1)
        reward = min(1.0, 0.3 + step / STEPS * (0.4 + i / PROMPTS))
        lines.append(
            {
                "index": i, "prompt": f"picture number {i} of a run that is large", "seed": i,
                "image": f"{folder.name}/{i:03d}.png", "shown": [], "response": "", "answer": None,
                "reward": reward, "parts": {"ocr": reward}, "text": "READ", "error": None,
            }
        )  # fmt: skip
    body = "".join(json.dumps(line) + "\n" for line in lines)
    folder.with_suffix(".jsonl").write_text(body)


@dataclass(frozen=True)
class Opened:
    seconds: float
    server: float  # CPU seconds until then
    browser: float


def open_once(browser: Browser, root: Path, view: str) -> Opened:
    """From the start of navigation to the main content, with a new server."""
    command = [sys.executable, "-m", "gesso.cli", "view", str(root), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stdout is not None
        address = re.search(r"http://\S+", server.stdout.readline())
        assert address, "the server did not start"
        tab = browser.tab()
        before = cpu(server.pid), cpu(browser.process.pid)
        tab.send("Page.navigate", url=f"{address[0]}/#/{view}")
        painted = tab.js(
            "new Promise((done) => { const look = () => {"
            f"if ({VIEWS[view]}) requestAnimationFrame(() => requestAnimationFrame(() => "
            "done(performance.now()))); else requestAnimationFrame(look); }; look(); })"
        )
        after = cpu(server.pid), cpu(browser.process.pid)
        tab.close()
        return Opened(painted / 1000, after[0] - before[0], after[1] - before[1])
    finally:
        server.terminate()
        server.wait(10)


def cpu(pid: int) -> float:
    """CPU seconds of a process and its children."""
    import psutil

    process = psutil.Process(pid)
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", type=int, default=256, help="side of the square images in pixels")
    parser.add_argument("--keep", type=Path, help="create the run folder here, or reuse it")
    options = parser.parse_args()
    if find() is None:
        print("Chromium was not found; run apt-get install chromium", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        root = options.keep or Path(folder) / "runs"
        if not (root / "large").exists():
            print("creating the run folder …", flush=True)
            make(root / "large", options.side)
        images = sum(1 for _ in (root / "large" / "samples").glob("*/*.png"))
        print(f"{STEPS + 1:,} rows, {images:,} images; {platform.processor() or 'CPU'}")
        browser = Browser(Path(folder) / "chromium")
        worst = 0.0
        for view in VIEWS:
            openings = [open_once(browser, root, view) for _ in range(options.rounds)]
            seconds = statistics.median(one.seconds for one in openings)
            worst = max(worst, seconds)
            each = ", ".join(f"{one.seconds:.2f}" for one in openings)
            server = statistics.median(one.server for one in openings)
            drawn = statistics.median(one.browser for one in openings)
            clocks = f"CPU: server {server:.2f}, browser {drawn:.2f}"
            print(f"{view:<10} {seconds:.2f} s  ({each})  {clocks}", flush=True)
        browser.close()
    return int(worst > BAR)


if __name__ == "__main__":
    sys.exit(main())

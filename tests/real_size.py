"""Models of real size with random weights on a CUDA device, through everything that a user does.

    python -m tests.real_size sd35-medium qwen25-vl-3b [--work FOLDER] [--out FOLDER]

Per model: weights are written, `gesso check`, `gesso train`, SIGKILL after two steps,
`gesso train --resume`, `gesso export`, and the result loaded by plain diffusers or transformers.
The result is a row of `real-size.md`: memory, times and the replay gap. `--brief` estimates the
memory and trains two steps, in about half of the time. `--tiny` runs tiny models, also on a CPU, to
test this script.

FLUX.2 dev needs 80 GB: `--transformer /dev/shm/flux2` keeps the larger part in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests import editors, pipelines, shapes, tokens

STEPS = 3
KILLED_AFTER = 2
MOST_SECONDS = 500  # of one command
REWARDS = {True: "jpeg-compressibility", False: "tests.token_rewards:early"}


@dataclass(frozen=True)
class Case:
    """A model of `shapes.py`, and a bundled recipe for it."""

    shape: str
    recipe: str
    card: int | None
    overrides: tuple[str, ...]
    tiny: str  # the model of pipelines.py, editors.py or tokens.py of the same class
    references: bool = False  # prompts of an image model that may have input images have them

    @property
    def draws(self) -> bool:
        return self.shape in shapes.SIZES

    @property
    def videos(self) -> bool:
        return self.shape.startswith("wan")

    @property
    def edits(self) -> bool:
        return self.tiny in editors.EDITORS


_RESPONSES = ("algorithm.max_tokens=460", "learner.micro_tokens=16384")
_RANK_16 = ("model.lora.rank=16", "model.lora.alpha=32")
_VIDEO = (  # 480p, 33 frames
    "model.height=480", "model.width=832", "model.frames=33", "eval.height=none",
    "eval.width=none", "eval.frames=none", "model.gradient_checkpointing=true", "data.groups=1",
    "algorithm.group=4", "algorithm.updates=1", "algorithm.steps=2",
    "algorithm.window={size=1,low=0,high=2}", "sampler.batch=2", "learner.micro_batch=2",
)  # fmt: skip
TINY_VIDEO = [
    "model.height=32", "model.width=32", "model.frames=5", "eval.height=none", "eval.width=none",
    "eval.frames=none",
]  # fmt: skip
CASES = {
    "sd35-medium": Case("sd35", "sd35-ocr", 80, ("data.groups=2",), "sd35"),
    "sd35-large": Case(
        "sd35-large", "sd35-ocr", 80,
        ("data.groups=1", "algorithm.group=16", "sampler.batch=8", "learner.micro_batch=8"), "sd3",
    ),
    "flux-dev": Case(
        "flux", "flux-pickscore", 80, ("data.groups=1", "algorithm.group=12"), "flux-dev"
    ),
    "qwen-image": Case(  # with rank 64 its checkpoints do not fit a disk of 64 GB
        "qwen-image", "qwen-image-ocr", 80, (*_RANK_16, "data.groups=1", "algorithm.group=8"),
        "qwen-image",
    ),
    "qwen-image-2512": Case(
        "qwen-image", "qwen-image-2512-ocr", 80,
        (*_RANK_16, "data.groups=1", "algorithm.group=8"), "qwen-image",
    ),
    "kontext": Case("kontext", "kontext-pickscore", 80, ("data.groups=1",), "kontext"),
    "qwen-edit": Case(
        "qwen-edit-short", "qwen-edit-2511-pickscore", 80,
        (*_RANK_16, "data.groups=1", "algorithm.group=8"), "qwen-edit",
    ),
    "flux2-klein-4b": Case(
        "flux2-klein", "flux2-klein-pickscore", 80, ("data.groups=1",), "flux2-klein"
    ),
    "flux2-klein-4b-edit": Case(
        "flux2-klein", "flux2-klein-pickscore", 80,
        ("data.groups=1", "sampler.batch=4", "learner.micro_batch=4"), "flux2-klein", True,
    ),
    "flux2-klein-9b": Case(
        "flux2-klein-9b", "flux2-klein-pickscore", 80,
        ("data.groups=1", "sampler.batch=4", "learner.micro_batch=4"), "flux2-klein",
    ),
    "flux2-dev": Case(
        "flux2-dev-short", "flux2-dev-pickscore", 80,
        (
            "data.groups=1", "algorithm.group=4", "model.quantize=none", "model.fold=false",
            "sampler.batch=2", "learner.micro_batch=2",
        ),
        "flux2-dev",
    ),
    "z-image": Case("z-image", "z-image-pickscore", 80, ("data.groups=1",), "z-image"),
    "sana": Case("sana", "sana-pickscore", 80, ("data.groups=2",), "sana"),
    "wan21-1.3b": Case("wan21", "wan21-1.3b-pickscore", None, _VIDEO, "wan"),
    "wan22-5b": Case("wan22", "wan22-5b-hpsv3", None, _VIDEO, "wan-ti2v"),
    "qwen25-vl-3b": Case(
        "qwen25-vl-3b", "qwen25-vl-3b-geo3k", 80,
        (*_RESPONSES, "data.groups=24", "algorithm.group=8", "algorithm.updates=2"), "qwen2.5-vl",
    ),
    "qwen25-vl-7b": Case(
        "qwen25-vl-7b", "qwen25-vl-7b-geo3k", 80,
        (*_RESPONSES, "data.groups=14", "algorithm.group=8", "algorithm.updates=2"), "qwen2.5-vl",
    ),
}  # fmt: skip


def main() -> None:
    options = _options()
    work = options.work or Path(tempfile.mkdtemp(prefix="real-size-"))
    rows = []
    for name in options.models or CASES:
        folder = work / name
        folder.mkdir(parents=True)
        if options.transformer:
            (folder / "model").mkdir()
            (folder / "model" / "transformer").symlink_to(options.transformer)
        rows.append(run(name, CASES[name], folder, options.tiny, options.brief))
        if not options.keep:
            shutil.rmtree(folder)
        options.out.mkdir(parents=True, exist_ok=True)
        _write_table(rows, options.out)
    if not options.keep:
        shutil.rmtree(work, ignore_errors=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(CASES))
    parser.add_argument("--work", type=Path, help="folder for weights and runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--transformer", type=Path, help="existing folder for its weights")
    parser.add_argument("--keep", action="store_true", help="keep weights and runs")
    parser.add_argument("--brief", action="store_true", help="only estimate and train")
    parser.add_argument("--tiny", action="store_true", help="tiny models, also on a CPU")
    options = parser.parse_args()
    if unknown := set(options.models) - set(CASES):
        parser.error(f"unknown models {sorted(unknown)}; expected {', '.join(CASES)}")
    if not options.tiny and not torch.cuda.is_available():
        parser.error("models of real size need a CUDA device; --tiny runs on a CPU")
    return options


def run(name: str, case: Case, folder: Path, tiny: bool, brief: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name}
    started = time.monotonic()

    def passed(what: str) -> None:
        nonlocal started
        row[f"{what} s"] = round(time.monotonic() - started, 1)
        print(f"{name}: {what}, {row[f'{what} s']} s", flush=True)
        started = time.monotonic()

    model = _write(case, folder / "model", tiny)
    passed("write")
    recipe = [case.recipe, *([] if tiny or case.card is None else ["--card", str(case.card)])]
    recipe += [*_common(case, model, folder, tiny), *(() if tiny else case.overrides)]
    trained = folder / "run"
    if brief:
        row |= _estimated(_gesso("check", "--memory", *recipe))
        _gesso("train", *recipe, f"steps={KILLED_AFTER}", "--run", str(trained))
        passed("train")
        return row | _of_rows(trained, KILLED_AFTER)
    row |= _checked(_gesso("check", *recipe))
    passed("check")
    row["first step s"] = _train_and_kill(recipe, trained)
    passed("train")
    _gesso("train", "--resume", str(trained))
    passed("resume")
    row |= _of_rows(trained, STEPS)
    row["resumed at"] = STEPS
    exported = folder / "exported"
    _gesso("export", str(trained), "--to", str(exported), "--weights", "current")
    passed("export")
    load = [sys.executable, "-m", "tests.load_exported", str(model), str(exported)]
    subprocess.run(load, check=True, timeout=MOST_SECONDS)
    passed("load")
    return row


def _write(case: Case, folder: Path, tiny: bool) -> Path:
    if tiny:
        draws = editors if case.edits else pipelines
        return (draws if case.draws else tokens).build(case.tiny, folder)
    write = shapes.write_pipeline if case.draws else shapes.write_weights
    made = write(case.shape, folder, torch.device("cuda"))
    torch.cuda.empty_cache()  # the commands below need the memory
    return made


def _common(case: Case, model: Path, folder: Path, tiny: bool) -> list[str]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(p) + "\n" for p in _prompts(case, folder)))
    overrides = [
        f"model.path={model}", f"data.train={prompts}", f"data.eval={prompts}", f"steps={STEPS}",
        f"reward=[{_reward(case)}]", "save.every=1", "save.keep=1",
        "eval.prompts=2",
    ]  # fmt: skip
    if case.draws:
        overrides.append("eval.steps=4")
    if tiny:
        overrides += ["model.dtype=float32", "model.quantize=none", "data.groups=2"]
        overrides.append("algorithm.group=3")
        small = {
            True: ["model.height=16", "model.width=16", "model.text_length=16"],
            False: ["algorithm.max_tokens=6", "model.min_pixels=256", "model.max_pixels=1024"],
        }
        overrides += [*small[case.draws], "algorithm.updates=1"]
        overrides += TINY_VIDEO if case.videos else []
    return overrides


def _reward(case: Case) -> str:
    """As TOML."""
    frames = ', frames="mean"' if case.videos else ""
    return f'{{name="{REWARDS[case.draws]}"{frames}}}'


def _prompts(case: Case, folder: Path) -> list[dict[str, Any]]:
    texts = [f"{thing} number {i}" for i in range(16) for thing in ("a red kite", "an old sign")]
    if not (case.edits or case.references or case.recipe.startswith("qwen25-vl")):
        return [{"prompt": text} for text in texts]
    for i in range(2):
        noise = np.random.default_rng(i).integers(0, 256, (448, 560, 3), np.uint8)
        Image.fromarray(noise).save(folder / f"{i}.png")
    mark = "" if case.draws else "<image>"
    return [{"prompt": f"{mark}{t}", "images": [f"{i % 2}.png"]} for i, t in enumerate(texts)]


def _gesso(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "gesso", *arguments], capture_output=True, text=True,
        timeout=MOST_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"gesso {arguments[0]}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


def _checked(output: str) -> dict[str, Any]:
    """What `gesso check` says of memory and of repeating the run."""
    repeats = re.search(r"^ *repeats +(.*)$", output, re.MULTILINE)
    assert repeats, output
    return {**_estimated(output), "repeats": repeats[1].split(",")[0].split(":")[0]}


def _estimated(output: str) -> dict[str, Any]:
    print(output)
    estimated = re.search(r"about ([\d.]+ [GM]B) at the peak", output)
    assert estimated, output
    return {"estimated": estimated[1]}


def _train_and_kill(recipe: list[str], run: Path) -> float:
    """Seconds until the first step has ended. SIGKILL after `KILLED_AFTER` steps."""
    log = run.with_suffix(".log")
    started = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "gesso", "train", *recipe, "--run", str(run)],
            stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    first = 0.0
    while (steps := _steps(run)) < KILLED_AFTER:
        first = first or (time.monotonic() - started if steps else 0.0)
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() - started < MOST_SECONDS, f"{steps} steps in {MOST_SECONDS} s"
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return round(first or time.monotonic() - started, 1)


def _rows(run: Path) -> list[dict[str, Any]]:
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _steps(run: Path) -> int:
    return sum("time/update" in row for row in _rows(run))


def _of_rows(run: Path, steps: int) -> dict[str, Any]:
    rows = [row for row in _rows(run) if "time/update" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1)), rows
    before = rows[KILLED_AFTER - 1]  # not the first of its process, which compiles
    return {
        "measured GB": round(max(row["memory/gb"] for row in rows), 1),
        "sample s": round(before["time/sample"], 2),
        "update s": round(before["time/update"], 2),
        "replay gap": max(row.get("update/first_abs_dlogp_max") or 0.0 for row in rows),
    }


def _write_table(rows: list[dict[str, Any]], out: Path) -> None:
    keys = list(rows[0])
    lines = ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    lines += ["| " + " | ".join(str(row[key]) for key in keys) + " |" for row in rows]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    title = f"Models of real size with random weights: {device}, torch {torch.__version__}"
    (out / "real-size.md").write_text("\n".join([title, "", *lines, ""]))
    (out / "real-size.json").write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()

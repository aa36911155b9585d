"""Compares one iteration of several image models by Gesso and by a plain script.

    python benchmarks/model_iteration.py [--models sd35-large flux qwen-image] [--rounds 2]
        [--out FOLDER] [--tiny]

Flow-GRPO-Fast with two trained steps of ten at the published sizes of the networks: random weights,
512², 8 images, LoRA rank 32, guidance by both branches where the model has two. The plain side has
frozen weights in bfloat16 (SD3.5-M in float32) and, for Qwen-Image, gradient checkpointing. Both
sides do not fit a GPU together, so ours runs first. benchmarks/README.md explains the output.
"""

from __future__ import annotations

import gesso  # before torch: sets how OpenMP threads wait  # noqa: F401

# isort: split
import argparse
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # for tests, which import this file
from flow_iteration import circumstances, compiled, matrix_peak, say
from flow_models import CASES, TINY_CASES, Case, load
from flow_sides import PHASES, Ours, Theirs, Times, Wordless

from gesso import config
from gesso.algorithms.flow_grpo_fast import FlowGRPOFast
from gesso.algorithms.stepped import Window
from gesso.traces.flow import Conditioning
from gesso.weights.policy import Policy

AIMS = {"of peak sampling": 0.60, "updating": 0.50, "plain / ours": 2.0}
HEAD = (
    "model", "side", "sample s", "decode s", "update s", "total s", "of peak sampling", "updating",
    "peak GB", "plain / ours",
)  # fmt: skip


def algorithm(case: Case) -> FlowGRPOFast:
    return FlowGRPOFast(
        group=case.shape.images, updates=1, steps=10, guidance=case.guidance,
        window=Window(size=2, low=0, high=5),
    )  # fmt: skip


def counted(case: Case) -> tuple[float, float]:
    """Forward and backward FLOPs of a row by torch's counter on the meta device, with adapters of
    rank 1. Attention's backward counts as two forwards; recomputation is not counted."""
    from torch.utils.flop_counter import FlopCounterMode

    meta, shape = torch.device("meta"), case.shape
    network = case.pipeline(shape, meta).transformer.requires_grad_(False).float()
    Policy(network, config.Lora(rank=1), case.kind.lora_targets, 0)
    settings = network.config
    width = settings.joint_attention_dim
    channels = settings.in_channels // (4 if case.kind.packed else 1)
    pooled = settings.get("pooled_projection_dim")
    cond = Conditioning(
        torch.empty(1, shape.text + (77 if case.kind is Wordless else 0), width, device=meta),
        None if pooled is None else torch.empty(1, pooled, device=meta),
        guidance=torch.empty(1, device=meta) if settings.get("guidance_embeds") else None,
    )
    x = torch.empty(1, channels, shape.size // 8, shape.size // 8, device=meta)
    totals = []
    with FlopCounterMode(display=False) as counter:
        out = case.form.velocity(network, x, torch.empty(1, device=meta), cond)
        totals.append(counter.get_total_flops())
        out.sum().backward()
        totals.append(counter.get_total_flops() - totals[0])
    return totals[0], totals[1]


def measure(case: Case, device: torch.device, rounds: int) -> dict[str, Any]:
    """Medians of some iterations of each side after a first one; ours compiles in it."""
    method = algorithm(case)
    ours = load(case, device, fold=True)
    row: dict[str, Any] = _ours(ours, method, rounds)
    branches = 2 if ours.model.guidance == "negative" else 1
    ours.release()
    _free()
    pipe = case.pipeline(case.shape, device)
    network = pipe.transformer.to(case.plain_dtype)
    if case.plain_checkpointing:
        network.enable_gradient_checkpointing()
    theirs = Theirs.of(network, pipe.vae.to(case.plain_dtype), case.form, ours, case.guidance)
    row["plain"] = _timed("plain", lambda: theirs.iteration(method), rounds)
    forward, backward = counted(case)
    rows = case.shape.images * branches  # of a step
    row["sampling flops"] = rows * method.steps * forward
    row["update flops"] = rows * method.terms_a_sample * (forward + backward)
    return row


def _ours(ours: Ours, method: FlowGRPOFast, rounds: int) -> dict[str, Any]:
    learner = ours.learner(method)
    gaps, graphs = [], []

    def step() -> Times:
        taken, metrics = ours.iteration(learner)
        gaps.append(metrics["update/first_abs_dlogp_max"])
        graphs.append(compiled())
        return taken

    row = {"ours": _timed("ours", step, rounds)}
    return row | {"replay gap": max(gaps), "compiled later": graphs[-1] - graphs[0]}


def _timed(side: str, step: Callable[[], Times], rounds: int) -> dict[str, float]:
    first = step()
    say(f"  {side}: first iteration {first['total']:.1f} s")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(rounds):
        times.append(step())
        say(f"  {side}: " + ", ".join(f"{phase} {times[-1][phase]:.3f}" for phase in PHASES))
    peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
    middle = {phase: median(t[phase] for t in times) for phase in PHASES}
    return middle | {"first": first["total"], "peak GB": peak}


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        say(f"  {torch.cuda.memory_allocated() / 1e9:.1f} GB left on the device")


def table(rows: dict[str, dict[str, Any]], peak: float) -> list[str]:
    lines = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    for name, row in rows.items():
        for side in ("plain", "ours"):
            times = row[side]
            shares = [
                f"{row[f'{work} flops'] / times[phase] / peak:.2f}"
                for work, phase in (("sampling", "sample"), ("update", "update"))
            ]
            ratio = row["plain"]["total"] / row["ours"]["total"]
            cells = [name, side, *(f"{times[phase]:.2f}" for phase in PHASES), *shares]
            cells += [f"{times['peak GB']:.1f}", f"**{ratio:.2f}**" if side == "ours" else ""]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    models = [name for name in CASES if name != "sd35"]
    parser.add_argument("--models", nargs="*", choices=[*CASES], default=models)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for models.md and models.json")
    parser.add_argument("--commit", default="", help="name of the measured code")
    parser.add_argument("--tiny", action="store_true", help="tiny models, also on a CPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        parser.error("models of real size need a CUDA device; --tiny runs on a CPU")
    facts: dict[str, Any] = circumstances(options.commit)
    cases = TINY_CASES if options.tiny else CASES
    peak = matrix_peak(device, torch.float32 if options.tiny else torch.bfloat16)
    facts["peak TFLOP/s"] = peak / 1e12
    rows: dict[str, dict[str, Any]] = {}
    for name in options.models:
        say(name)
        rows[name] = measure(cases[name], device, options.rounds)
        _free()
        if options.out:
            _write(options.out, facts, rows, peak)
    print("\n".join(table(rows, peak)))
    wrong = faults(rows, 1e-5 if options.tiny else 0.0)
    print("\n".join(wrong))
    return 1 if wrong else 0


def faults(rows: dict[str, dict[str, Any]], gap: float) -> list[str]:
    """`gap`: accepted between log-probs of sampling and replay."""
    found = []
    for name, row in rows.items():
        if row["compiled later"]:
            found.append(f"{name}: compiled after the first iteration")
        if row["replay gap"] > gap:
            found.append(f"{name}: log-probs of replay differ by {row['replay gap']:.1e}")
    return found


def _write(out: Path, facts: dict[str, Any], rows: dict[str, Any], peak: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "models.json").write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    header = [f"- {name}: {value}" for name, value in facts.items()]
    (out / "models.md").write_text("\n".join([*header, "", *table(rows, peak), ""]))


if __name__ == "__main__":
    sys.exit(main())

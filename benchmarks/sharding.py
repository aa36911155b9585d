"""Measures what sharding by FSDP2 costs in a world of one device.

    python benchmarks/sharding.py [--models sd35 flux] [--rounds 3] [--not-folded] [--out FOLDER]
        [--tiny]

An iteration of Flow-GRPO with LoRA on networks of SD3.5-M's and FLUX.1-dev's shape, random weights,
512², 10 steps: adapters folded into the weights, not folded, and not folded with a sharded base.
With one device nothing is sent, but blocks are still copied and freed.
"""

from __future__ import annotations

import gesso  # before torch: sets how OpenMP threads wait  # noqa: F401

# isort: split
import argparse
import gc
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed

sys.path.insert(0, str(Path(__file__).parent))  # for tests, which import this file
from flow_models import CASES, TINY_CASES, Case, load
from flow_sides import PHASES, Ours, Times

from gesso.algorithms.flow_grpo import FlowGRPO
from gesso.ranks import ALONE, Group, Ranks
from gesso.weights.layout import Layout
from gesso.worker import BACKENDS

AIM = 1.05  # times the same without sharding
MODELS = ["sd35", "flux"]


def iterations(ours: Ours, ranks: Ranks, rounds: int) -> dict[str, Any]:
    """The median of some iterations after a first one, which compiles."""
    algorithm = FlowGRPO(beta=0.0, group=ours.shape.images, updates=1)
    learner = ours.learner(algorithm, ranks)
    first, metrics = ours.iteration(learner)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times: list[Times] = [ours.iteration(learner)[0] for _ in range(rounds)]
    return {
        "first": first["total"],
        **{phase: median(t[phase] for t in times) for phase in PHASES},
        "gap": metrics["update/first_abs_dlogp_max"],
        "grad_norm": metrics["update/grad_norm"],
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0,
    }


def measure(
    case: Case, device: torch.device, rounds: int, folded: bool
) -> dict[str, dict[str, Any]]:
    rows = {}
    if folded:
        ours = load(case, device, fold=True)
        rows["folded"] = show("folded", iterations(ours, ALONE, rounds))
        del ours
        gc.collect()
        torch.cuda.empty_cache()
    ours = load(case, device, fold=False)
    rows["not folded"] = show("not folded", iterations(ours, ALONE, rounds))
    model = ours.model
    model.policy.shard(model.sharding, device, Layout(ranks=1, within=1, offload=False))
    rows["sharded"] = show("sharded", iterations(ours, Group(device, in_step=True), rounds))
    return rows


def show(name: str, row: dict[str, Any]) -> dict[str, Any]:
    print(f"{name:<12}" + "".join(f" {key} {value:.4g}" for key, value in row.items()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--not-folded", action="store_true", help="leave out folded adapters")
    parser.add_argument("--out", type=Path, help="folder for sharding.json")
    parser.add_argument("--tiny", action="store_true", help="tiny models, also on a CPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        parser.error("models of real size need a CUDA device; --tiny runs on a CPU")
    distributed.init_process_group(
        BACKENDS[device.type], store=distributed.HashStore(), rank=0, world_size=1
    )
    found: dict[str, Any] = {}
    for name in options.models:
        print(name, flush=True)
        case = (TINY_CASES if options.tiny else CASES)[name]
        found[name] = measure(case, device, options.rounds, not options.not_folded)
        cost = found[name]["sharded"]["total"] / found[name]["not folded"]["total"]
        print(f"{name}: sharding takes {cost:.3f} times as long; aim {AIM}", flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "sharding.json").write_text(json.dumps(found, indent=1) + "\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

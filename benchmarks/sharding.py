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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed

sys.path.insert(0, str(Path(__file__).parent))  # for tests, which import this file
from flow_sides import (
    MEDIUM,
    PHASES,
    TINY,
    Ours,
    RandomEmbeddings,
    Shape,
    Times,
    Wordless,
    random_pipeline,
)

from gesso import config
from gesso.algorithms.flow_grpo import FlowGRPO
from gesso.models.flow import loading
from gesso.models.flow.compiled import sizes
from gesso.models.flow.flux import Flux
from gesso.ranks import ALONE, Group, Ranks
from gesso.weights.layout import Layout
from gesso.worker import BACKENDS

AIM = 1.05  # times the same without sharding


class WordlessFlux(RandomEmbeddings, Flux):
    """FLUX.1 without text encoders."""


@dataclass(frozen=True)
class Case:
    kind: type[RandomEmbeddings]
    shape: Shape
    pipeline: Callable[[Shape, torch.device], Any]


def _flux(shape: Shape, device: torch.device) -> Any:
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        FluxPipeline,
        FluxTransformer2DModel,
    )

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            kinds = len(shape.decoder["block_out_channels"])
            transformer = FluxTransformer2DModel(guidance_embeds=True, **shape.transformer)
            vae = AutoencoderKL(
                latent_channels=16, use_quant_conv=False, use_post_quant_conv=False,
                shift_factor=0.0609, **shape.decoder,
                down_block_types=("DownEncoderBlock2D",) * kinds,
                up_block_types=("UpDecoderBlock2D",) * kinds,
            )  # fmt: skip
    finally:
        torch.set_default_dtype(before)
    absent = {f"{part}{i}": None for part in ("text_encoder", "tokenizer") for i in ("", "_2")}
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return FluxPipeline(transformer=transformer, vae=vae, scheduler=scheduler, **absent)


FLUX = Shape({}, MEDIUM.decoder, size=512, text=512, images=8, dtype="bfloat16")
TINY_FLUX = Shape(
    {
        "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16, "in_channels": 64,
        "num_attention_heads": 2, "joint_attention_dim": 24, "pooled_projection_dim": 16,
        "axes_dims_rope": (4, 6, 6),
    },
    TINY.decoder, size=64, text=4, images=4, dtype="float32",
)  # fmt: skip
CASES = {"sd35": Case(Wordless, MEDIUM, random_pipeline), "flux": Case(WordlessFlux, FLUX, _flux)}
TINY_CASES = {
    "sd35": Case(Wordless, TINY, random_pipeline),
    "flux": Case(WordlessFlux, TINY_FLUX, _flux),
}


def load(case: Case, device: torch.device, fold: bool) -> Ours:
    shape = case.shape
    section = config.Model(
        path="", height=shape.size, width=shape.size, text_length=shape.text, dtype=shape.dtype,
        device=str(device), lora=config.Lora(), fold=fold,
    )  # fmt: skip

    def random_weights(*_: Any) -> Any:
        pipe = case.pipeline(shape, device)
        for network in (pipe.transformer, pipe.vae):
            network.to(getattr(torch, shape.dtype))
        return pipe

    with patch.object(loading, "load_pipeline", random_weights):
        model = case.kind(section)
    model.sizes = sizes(shape.images, shape.images)
    return Ours(model, shape)


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
    parser.add_argument("--models", nargs="*", choices=[*CASES], default=[*CASES])
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

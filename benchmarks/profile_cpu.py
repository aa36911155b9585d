"""Profiles an iteration on a CPU: matrix multiplications, convolutions, and the rest.

    python benchmarks/profile_cpu.py [--recipe demo demo-vlm] [--rows 12] [--wide 2] [key=value ...]

torch's profiler counts the self time of each operator; *outside torch* is the rest of the wall
time: Python, tokenizers, images. Scores are synthetic. Run it with one thread on an idle machine.
`--wide N` makes the bundled image model N times as wide, with random weights: matmuls grow
with the square of the width, everything else with the width.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity, profile
from unscored import iterations

from gesso.config import ZOO, resolve_path

KINDS = {
    "matmuls": ("mm", "addmm", "bmm", "baddbmm", "addbmm", "linear"),
    "convolutions": ("convolution", "conv"),
    "attention": ("scaled_dot_product",),
}


def kind_of(operator: str) -> str:
    name = operator.rpartition("::")[2].lstrip("_").removeprefix("mkldnn_").removeprefix("mkl_")
    for kind, starts in KINDS.items():
        if name.startswith(starts):
            return kind
    return "other operators"


def widened(times: int, folder: Path) -> Path:
    """The bundled pipeline with more attention heads."""
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    absent = {"text_encoder_3": None, "tokenizer_3": None}
    pipe = StableDiffusion3Pipeline.from_pretrained(resolve_path(f"{ZOO}signs"), **absent)
    config = dict(pipe.transformer.config)
    for key in ("num_attention_heads", "caption_projection_dim"):
        config[key] *= times
    torch.manual_seed(0)
    pipe.transformer = SD3Transformer2DModel.from_config(config)
    pipe.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", nargs="*", default=["demo", "demo-vlm"])
    parser.add_argument("--rows", type=int, default=12, help="operators to list")
    parser.add_argument("--wide", type=int, default=1, help="multiple of the bundled model's width")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if options.wide > 1:
            options.overrides.append(f"model.path={widened(options.wide, Path(folder))}")
        for recipe in options.recipe:
            measure(recipe, options.overrides, options.rows)


def measure(recipe: str, overrides: list[str], rows: int) -> None:
    with iterations(recipe, overrides) as once:
        once()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            before = perf_counter()
            once()
            seconds = perf_counter() - before
    report(recipe, seconds, profiler.key_averages(), rows)


def report(recipe: str, seconds: float, events: list, rows: int) -> None:
    shares: dict[str, float] = defaultdict(float)
    for event in events:
        shares[kind_of(event.key)] += event.self_cpu_time_total / 1e6 / seconds
    shares["outside torch"] = 1 - sum(shares.values())
    print(f"{recipe}: {seconds:.2f} s per iteration")
    for kind, share in sorted(shares.items(), key=lambda pair: -pair[1]):
        print(f"  {kind:<16} {share:.2f}")
    matrix = shares["matmuls"] + shares["convolutions"] + shares["attention"]
    print(f"  matrix operations: {matrix:.2f}, target .80")
    others = [e for e in events if kind_of(e.key) == "other operators"]
    for event in sorted(others, key=lambda e: -e.self_cpu_time_total)[:rows]:
        self_seconds = event.self_cpu_time_total / 1e6
        print(f"    {event.key[:48]:<48} {self_seconds / seconds:.3f} {event.count:>7} calls")


if __name__ == "__main__":
    main()

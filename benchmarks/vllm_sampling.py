"""Compares tokens per second of the built-in sampler and vLLM, with the same model and prompts.

    .venv-vllm/bin/python benchmarks/vllm_sampling.py FOLDER [--batch 64] [--tokens 128]

FOLDER is a text model of transformers. The engines alternate. On a busy machine wall time is not
reliable: on a CPU use the tokens per second of CPU time, with OMP_NUM_THREADS=1. Run it with the
Python of an environment that has vLLM.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

from gesso import config
from gesso.models.tokens.causal import Causal
from gesso.samplers.decode import DecodingSampler
from gesso.samplers.vllm import VllmSampler
from gesso.types import Prompt, ResponseSpec

ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    section = config.TokenModel(
        name="causal", path=options.folder, dtype=options.dtype, max_prompt=64
    )
    model = Causal(section)
    settings = config.Sampler(batch=options.batch, engine="vllm")
    longest = section.max_prompt + options.tokens
    engines: dict[str, Any] = {
        "built-in": DecodingSampler(model, options.batch),
        "vllm": VllmSampler(model, settings, longest),
    }
    for sampler in engines.values():
        rate(sampler, options.batch, options.tokens, 0)
    rates: dict[str, list[Rate]] = {name: [] for name in engines}
    for i in range(1, ROUNDS + 1):
        for name, sampler in engines.items():
            rates[name].append(rate(sampler, options.batch, options.tokens, i))
    for clock in ("wall", "cpu"):
        by_engine = {name: [getattr(r, clock) for r in each] for name, each in rates.items()}
        for name, values in by_engine.items():
            low, middle, high = min(values), statistics.median(values), max(values)
            print(f"{clock:5}{name:9}{middle:8.0f} tokens/s  ({low:.0f} to {high:.0f})")
        ratios = [v / b for v, b in zip(by_engine["vllm"], by_engine["built-in"], strict=True)]
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        print(f"{clock:5}vllm / built-in: {middle:.2f}  ({low:.2f} to {high:.2f}, by rounds)")
    started = time.perf_counter()
    engines["vllm"].load(model.policy.tensors(), 1)
    rate(engines["vllm"], 1, 1, 0)
    print(f"vllm, new weights and one token: {time.perf_counter() - started:.2f} s")


@dataclass(frozen=True)
class Rate:
    """Tokens per second: of wall time, and of this process's CPU time."""

    wall: float
    cpu: float


def rate(sampler: Any, batch: int, tokens: int, seed: int) -> Rate:
    """Prompts of one call: responses in groups of 8, as many as fit into a batch."""
    prompts = [Prompt(f"what is {i} + {i}?") for i in range(-(-batch // 8))]
    row = [i // 8 for i in range(batch)]
    seeds = [seed * batch + i for i in range(batch)]
    started, used = time.perf_counter(), time.process_time()
    pieces = list(sampler.sample(prompts, row, seeds, ResponseSpec(tokens, 1.0)))
    written = sum(int(piece.trace.mask.sum()) for piece in pieces)
    return Rate(written / (time.perf_counter() - started), written / (time.process_time() - used))


if __name__ == "__main__":
    main()

"""Holds `gesso plan` against our H200 tables and against figures that other projects publish.

    python -m benchmarks.plan_gpu [CASE …] [--out FILE]

Needs neither weights nor a GPU: the shapes of `tests/shapes.py`, and the settings of each table.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gesso import build
from gesso.plan import gpus, tabulated, work
from gesso.plan.simulate import Prediction, simulate
from tests import shapes

SD35 = (
    "sd35-ocr", "data.groups=1", "sampler.batch=16", "learner.micro_batch=16",
    "learner.ema=none",
)  # fmt: skip
ALGORITHM = '{name="%s",group=16,updates=1%s}'
RESPONSES = ("learner.micro_tokens=16384", "model.train_vision=false")
LORA = "model.lora={rank=64,alpha=64}"


@dataclass(frozen=True)
class Case:
    shape: str
    settings: tuple[str, ...]  # the recipe and overrides
    measured: float  # seconds of a step
    source: str
    card: int | None = None
    gpu: str = "h200"
    workers: int = 1
    response: int | None = None
    peer: bool = False  # the figure is another project's


def sd35(name: str, seconds: float, more: str = "") -> Case:
    algorithm = f"algorithm={ALGORITHM % (name, more)}"
    return Case("sd35", (*SD35, algorithm), seconds, "flow.md")


def fast(shape: str, recipe: str, seconds: float, guidance: float, *more: str) -> Case:
    """A row of model_iteration.py."""
    algorithm = (
        f'algorithm={{name="flow-grpo-fast",group=8,updates=1,steps=10,guidance={guidance},'
        "window={size=2,low=0,high=5}}"
    )
    settings = (
        recipe, algorithm, "data.groups=1", "sampler.batch=8", "learner.micro_batch=8",
        "learner.ema=none", "model.lora={rank=32,alpha=64}", *more,
    )  # fmt: skip
    return Case(shape, settings, seconds, "models.md")


CASES = {
    "Flow-GRPO": sd35("flow-grpo", 4.89, ",beta=0.0"),
    "Flow-GRPO, one branch": sd35(
        "flow-grpo", 3.31, ',beta=0.0,guidance_gradient="conditional"'
    ),
    "DiffusionNFT": sd35("diffusion-nft", 4.00),
    "Flow-GRPO-Fast": sd35("flow-grpo-fast", 1.44),
    "SD3.5-M, UniRL's sizes": Case(
        "sd35",
        ("sd35-ocr", "model.height=384", "model.width=384", "sampler.batch=64",
         "learner.micro_batch=64", "learner.ema=none",
         'algorithm={name="flow-grpo-fast",group=16,updates=2,steps=10}'),
        39.1, "yardstick.md",
    ),
    "FLUX.1-dev": Case(
        "flux",
        ("flux-pickscore", "data.groups=1", "sampler.batch=8", "learner.micro_batch=8",
         "learner.ema=none", "model.text_length=512", "algorithm.group=8", "algorithm.steps=10",
         "algorithm.updates=1"),
        10.86, "sharding.md",
    ),
    "FLUX.1-dev, two trained steps": fast(
        "flux", "flux-pickscore", 4.88, 3.5, "model.text_length=512"
    ),
    "SD3.5-L, two trained steps": fast("sd35-large", "sd35-ocr", 3.37, 4.5),
    "Qwen-Image, two trained steps": fast(
        "qwen-image", "qwen-image-ocr", 7.55, 4.0, "model.text_length=128",
        "model.gradient_checkpointing=false", "model.fold=true",
    ),
    "Qwen2.5-VL-3B, 512 × 256 tokens": Case(
        "qwen25-vl-3b",
        ("qwen25-vl-3b-geo3k", LORA, *RESPONSES, "data.groups=64", "algorithm.group=8",
         "algorithm.updates=1", "algorithm.max_tokens=256", "algorithm.kl=none",
         "sampler.batch=512", "model.max_prompt=280", "model.max_pixels=200704",
         "model.min_pixels=200704", "model.gradient_checkpointing=false"),
        7.54, "token.md",
    ),
    "UniRL, SD3.5-M 384², 8 × H20": Case(
        "sd35",
        ("sd35-ocr", "model.height=384", "model.width=384", "sampler.batch=16",
         "learner.micro_batch=16", "learner.ema=none",
         'algorithm={name="flow-grpo-fast",group=16,updates=2,steps=10}'),
        45.0, "UniRL's table", gpu="h20", workers=8, peer=True,
    ),
    "VeRL-Omni, Qwen-Image LoRA, 8 × H800": Case(
        "qwen-image",
        ("qwen-image-ocr",), 32 * 16 / 8 / 0.305, ".305 images/s and GPU", 80, gpu="h800",
        workers=8, peer=True,
    ),
    "EasyR1, Qwen2.5-VL-7B, 8 × H100": Case(
        "qwen25-vl-7b",
        ("qwen25-vl-7b-geo3k", "model.lora=none", "model.train_vision=false",
         "cluster.workers=8", "cluster.sharding=all", "sampler.batch=128", "model.max_prompt=700"),
        512 * 5 * (700 + 400) / 8 / 2000, "2,000 tokens/s and GPU", gpu="h100", workers=8,
        response=400, peer=True,
    ),
}  # fmt: skip


def predict(case: Case, folder: Path) -> Prediction:
    name, *overrides = case.settings
    flow = case.shape in shapes.SIZES
    write: Any = shapes.write_configs if flow else shapes.write_writer
    path = write(case.shape, folder / case.shape)
    recipe = build.recipe(name, [f"model.path={path}", *overrides], case.card)
    counted = work.count(recipe, case.response)
    gpu = gpus.find(case.gpu)
    rates = tabulated.rates(counted, gpu, recipe, case.workers)
    return simulate(recipe, case.workers, rates, counted.longest)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = ["| | predicted s | measured s | of it | source |", "|---|---|---|---|---|"]
    for name in options.cases or CASES:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            found = predict(case, Path(folder))
        shares = {phase: round(found.step * share, 2) for phase, share in found.shares.items()}
        ratio = found.step / case.measured
        cells = (name, f"{found.step:.2f}", f"{case.measured:.2f}", f"{ratio:.2f}", case.source)
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], shares, flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()

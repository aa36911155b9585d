"""On a CUDA device: `pytest -m gpu`. Half precision, 4 bits, and the CPU's results again."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from gesso import build
from gesso.run import load, train
from gesso.track.run_folder import RunFolder
from tests import pipelines
from tests.rollouts import parts_of, rollout_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


ODD = pytest.mark.xfail(
    reason="not finite on an H200 with bitsandbytes 0.50: layers of 8 to 160 inputs, which its "
    "blocks of 64 do not divide; to be tried again with larger tiny models"
)


def rows_of(run: RunFolder) -> list[dict]:
    return list(run.rows())


def test_a_run_on_cuda_draws_what_the_cpu_draws(recipe_data: dict, tmp_path: Path) -> None:
    """Noise comes from the CPU's generator on both, so the pictures agree."""
    rewards = {}
    for device in ("cpu", "cuda"):
        recipe_data["model"]["device"] = device
        recipe = build.recipe_from(recipe_data)
        run = train(recipe, folder=tmp_path / device, quiet=True)
        rewards[device] = [row["eval/reward"] for row in rows_of(run) if "eval/reward" in row]
    assert rewards["cuda"] == pytest.approx(rewards["cpu"], rel=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}], ids=["full", "lora"])
def test_replay_meets_sampling(recipe_data: dict, dtype: str, lora: dict | None) -> None:
    recipe_data["model"] |= {"device": "cuda", "dtype": dtype, "lora": lora}
    recipe_data["optimizer"] = {"lr": 1e-5}
    model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
    rollout = rollout_of(model, algorithm)
    metrics = learner.update(rollout, 0)
    gap = metrics["update/first_abs_dlogp_max"]
    print(f"replay gap {dtype} {'lora' if lora else 'full'}: {gap:.1e}")
    assert gap < {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}[dtype]
    assert metrics["update/skipped"] == 0
    assert {p.dtype for p in learner.policy.trained.values()} == {torch.float32}


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize(
    "name",
    [
        "sd35",
        pytest.param("flux-dev", marks=ODD),
        pytest.param("qwen-image", marks=ODD),
    ],
)
def test_four_bits(name: str, recipe_data: dict, tmp_path: Path) -> None:
    """The frozen weights are small, the adapter learns, and its export loads into diffusers."""
    folder = pipelines.build(name, tmp_path / "pipeline")
    kind = {"sd35": "sd3", "flux-dev": "flux"}.get(name, name)
    recipe_data["model"] = {
        "name": kind, "path": str(folder), "height": 32, "width": 32, "device": "cuda",
        "dtype": "bfloat16", "quantize": "nf4", "lora": {"rank": 4, "alpha": 8},
        "text_length": 16,
    }  # fmt: skip
    recipe_data["algorithm"]["clip"] = 0.2
    run = train(build.recipe_from(recipe_data), folder=tmp_path / "run", quiet=True)
    assert rows_of(run)[-1]["update/grad_norm"] > 0
    trained = load(run.path)
    kinds = {type(layer).__name__ for layer in trained.model.policy.module.modules()}
    assert "Linear4bit" in kinds
    trained.export(tmp_path / "lora")
    assert list((tmp_path / "lora").glob("*.safetensors"))

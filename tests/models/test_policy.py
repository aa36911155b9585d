from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gesso import build
from gesso.config import Lora, Model
from gesso.models.flow.sd3 import SD3
from gesso.types import UserError
from tests.conftest import PROMPTS
from tests.rollouts import parts_of, rollout_of


def picture(pipe: Any, folder: Path) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    noise = torch.randn(1, 8, 8, 24, generator=torch.Generator().manual_seed(0))
    return pipe(
        PROMPTS[0], height=32, width=96, num_inference_steps=3, guidance_scale=1.0,
        max_sequence_length=0, latents=noise, output_type="latent",
    ).images  # fmt: skip


def test_weight_transfer_is_strict(recipe_data: dict) -> None:
    policy = build.model(build.recipe_from(recipe_data)).policy
    weights = dict(policy.tensors())
    name, tensor = weights.popitem()
    with pytest.raises(ValueError, match="1 tensor is missing, first"):
        policy.load(weights)
    with pytest.raises(ValueError, match=r"1 tensor is of a different shape, first .*: expected "):
        policy.load(weights | {name: tensor[:1]})


def test_lora_init_comes_from_the_seed_alone(pipeline_folder: Path) -> None:
    settings = Model(path=str(pipeline_folder), lora=Lora(rank=4, alpha=8))
    torch.manual_seed(1)
    first = SD3(settings, seed=5).policy.tensors()
    state = torch.random.get_rng_state()
    second, other = SD3(settings, seed=5).policy.tensors(), SD3(settings, seed=6).policy.tensors()
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert any(not torch.equal(first[n], other[n]) for n in first)
    assert torch.equal(state, torch.random.get_rng_state())


def test_other_weights_take_their_place_and_leave_it(recipe_data: dict) -> None:
    recipe_data["learner"] |= {"ema": {"every": 1, "decay": 0.5}}
    model, algorithm, learner = parts_of(build.recipe_from(recipe_data))
    rollout = rollout_of(model, algorithm)
    x, cond = rollout.flow_trace.clean, rollout.flow_trace.context.cond.rows(rollout.flow_trace.row)
    sigma = torch.full((6,), 0.5)
    for step in range(3):
        learner.update(rollout, step)
    with torch.no_grad():
        current = model.velocity(x, sigma, cond)
        averaged = model.velocity(x, sigma, cond, "ema")
        assert (current - averaged).abs().max() > 1e-6
        assert torch.equal(model.velocity(x, sigma, cond), current)
        with pytest.raises(RuntimeError, match="midway"), model.policy.using("ema"):
            raise RuntimeError("midway")
        assert torch.equal(model.velocity(x, sigma, cond), current)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 16}])
def test_an_export_gives_the_same_image_in_plain_diffusers(
    recipe_data: dict, pipeline_folder: Path, tmp_path: Path, lora: dict | None
) -> None:
    from diffusers import StableDiffusion3Pipeline

    recipe_data["model"]["lora"] = lora
    recipe_data["optimizer"] = {"lr": 1e-2}
    recipe = build.recipe_from(recipe_data)
    model, algorithm, learner = parts_of(recipe)
    learner.update(rollout_of(model, algorithm), 0)
    expected = picture(model.pipe, tmp_path)
    folder = tmp_path / "out"
    model.save(folder)
    absent = {"text_encoder_3": None, "tokenizer_3": None}
    if lora is None:
        plain = StableDiffusion3Pipeline.from_pretrained(folder, **absent)
    else:
        plain = StableDiffusion3Pipeline.from_pretrained(pipeline_folder, **absent)
        assert (picture(plain, tmp_path) - expected).abs().max() > 1e-3
        plain.load_lora_weights(folder)
    assert (picture(plain, tmp_path) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    "path, found", [("/no/such", "does not exist"), (".", "does not contain it")]
)
def test_a_folder_without_a_pipeline(path: str, found: str) -> None:
    with pytest.raises(UserError, match=found):
        SD3(Model(path=path))


def test_a_broken_pipeline_folder(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    with pytest.raises(UserError, match="cannot load it as a StableDiffusion3Pipeline"):
        SD3(Model(path=str(tmp_path)))


@pytest.mark.parametrize("device", ["nonsense", "cuda:77"])
def test_a_device_that_is_not_there(device: str) -> None:
    with pytest.raises(UserError, match=f'model.device = "{device}" is not available'):
        SD3(Model(path="zoo:signs", device=device))


def test_a_size_that_does_not_fit(pipeline_folder: Path) -> None:
    model = SD3(Model(path=str(pipeline_folder)))
    with pytest.raises(UserError, match="multiples of 8; use 32×96"):
        model.latent_shape(33, 97)

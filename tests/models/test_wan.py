"""Wan against diffusers' own pipelines: tiny random weights of the real classes, on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gesso import build, imports
from gesso.config import Learner as LearnerSection
from gesso.config import Lora, Model, Optimizer
from gesso.families import classes
from gesso.learner.learner import Learner
from gesso.models.flow.compiled import compile_blocks, compile_decoder
from gesso.samplers.denoise import DenoisingSampler, Piece
from gesso.types import Prompt, SampleSpec, UserError
from gesso.use import folders
from tests import pipelines
from tests.conftest import small_recipe
from tests.models.test_pipelines import stirred
from tests.rollouts import rollout_of

PROMPTS = [Prompt("a red cat", "dull"), Prompt("oak", "an oak tree")]
ROWS, SEEDS = [0, 1, 1], [11, 12, 13]
STEPS = 3
HEIGHT, WIDTH, FRAMES = 16, 32, 9  # 3 × 2 × 4 latent cells


def model_of(folder: Path, name: str = "wan", **settings: Any) -> Any:
    kind = imports.load(classes.REFERENCES[name], "model")
    text = {"text_length": 16} | settings
    return kind(Model(name=name, path=str(folder), **text), seed=1)


def spec(**settings: Any) -> SampleSpec:
    size = {"height": HEIGHT, "width": WIDTH, "frames": FRAMES}
    return SampleSpec(steps=STEPS, **(size | settings))


def drawn(model: Any, spec: SampleSpec) -> Piece:
    (piece,) = DenoisingSampler(model, 4).sample(PROMPTS, ROWS, SEEDS, spec)
    return piece


def euler(pipe: Any, steps: int = STEPS) -> Any:
    """The pipeline with UniPC of order 1 without its corrector, which is the Euler step."""
    plain = {"solver_order": 1, "disable_corrector": list(range(steps))}
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, **plain)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipelines.build("wan", tmp_path_factory.mktemp("wan"))


def theirs(pipe: Any, kind: str, guidance: float, **changes: Any) -> Any:
    """What a user of diffusers would type for ROWS and SEEDS."""
    chosen = [PROMPTS[r] for r in ROWS]
    size = {"height": HEIGHT, "width": WIDTH, "num_frames": FRAMES, "num_inference_steps": STEPS}
    return pipe(
        prompt=[p.text for p in chosen], negative_prompt=[p.negative for p in chosen],
        **(size | changes), guidance_scale=guidance, max_sequence_length=16, output_type=kind,
        generator=[torch.Generator().manual_seed(seed) for seed in SEEDS],
    ).frames  # fmt: skip


def text_pipe(folder: Path) -> Any:
    from diffusers import WanPipeline

    return euler(WanPipeline.from_pretrained(folder))


@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_without_noise_it_is_diffusers_own_pipeline(wan: Path, guidance: float) -> None:
    ours, pipe = drawn(model_of(wan), spec(guidance=guidance)), text_pipe(wan)
    assert gap(ours.trace.clean, theirs(pipe, "latent", guidance)) < 1e-5
    for sample, video in zip(ours.samples, theirs(pipe, "np", guidance), strict=True):
        assert sample.frames.shape == (FRAMES, HEIGHT, WIDTH, 3) and sample.fps == 16
        assert abs(sample.frames / 255.0 - video).max() <= 0.51 / 255


def test_a_video_of_one_frame_is_an_image(wan: Path) -> None:
    model = model_of(wan)
    piece = drawn(model, spec(frames=1))
    assert piece.samples[0].pixels.shape == (HEIGHT, WIDTH, 3) and piece.samples[0].fps is None
    images = torch.from_numpy(np.stack([s.pixels for s in piece.samples]))
    assert model.encode_images(images).shape == piece.trace.clean.shape == (3, 4, 1, 2, 4)


ALGORITHMS: dict[str, dict[str, Any]] = {
    "flow-grpo": {"guidance": 2.0},
    "flash-grpo": {"window": {"size": 1, "low": 0, "high": 2, "per": "prompt"}},
    "diffusion-nft": {"times": 2},
    "awm": {"times": 1, "first": 1, "last": 2},
    "draft": {"guidance": 2.0},
    "flow-dpo": {},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_train_on_videos(wan: Path, name: str) -> None:
    """Replayed log-probs are those of sampling."""
    kind = imports.load(build.ALGORITHMS[name], "algorithm")
    algorithm = kind(name=name, updates=1, group=3, steps=STEPS, **ALGORITHMS[name])
    if name == "draft":
        algorithm = algorithm.with_reward(lambda videos, prompts: videos.mean((1, 2, 3, 4)))
    model = stirred(model_of(wan, lora=Lora(rank=2, alpha=4)))
    for copy in algorithm.needs:
        model.policy.snapshot(copy)
    size = Model(path="", height=HEIGHT, width=WIDTH, frames=FRAMES)
    rollout = rollout_of(model, algorithm, size=size)
    assert rollout.flow_trace.clean.shape == (6, 4, 3, 2, 4)
    learner = Learner(model, algorithm, Optimizer(), LearnerSection(micro_batch=4), seed=0)
    metrics = learner.update(rollout, 0).metrics
    assert metrics["update/grad_norm"] > 0
    assert metrics.get("update/first_abs_dlogp_max", 0.0) < 1e-5


def test_a_lora_in_plain_diffusers(wan: Path, tmp_path: Path) -> None:
    model = stirred(model_of(wan, lora=Lora(rank=2, alpha=6)))
    layers = {name.rsplit(".lora", 1)[0] for name in model.policy.trainable}
    assert len(layers) == 2 * (2 * 4 + 2)  # blocks: attentions, feed-forward
    ours, pipe = drawn(model, spec()).trace.clean, text_pipe(wan)
    assert gap(theirs(pipe, "latent", 1.0), ours) > 0.05
    model.save(tmp_path / "lora")
    pipe.load_lora_weights(tmp_path / "lora")
    assert gap(theirs(pipe, "latent", 1.0), ours) < 1e-4
    model.save(tmp_path / "whole", merged=True)
    assert gap(theirs(text_pipe(tmp_path / "whole"), "latent", 1.0), ours) < 1e-4
    again = model_of(wan, lora=Lora(rank=2, alpha=6, path=str(tmp_path / "lora")))
    assert torch.equal(drawn(again, spec()).trace.clean, ours)


def test_compiled_blocks_join_self_attention_alone(tmp_path: Path) -> None:
    """Keys and values of the cross-attention come from the text."""
    wan = pipelines.build("wan", tmp_path / "wan", num_layers=1)
    model = stirred(model_of(wan, lora=Lora(rank=2, alpha=4), fold=True))
    noisy = spec(noise=0.5, stochastic=range(2), trained=range(2))
    plain = drawn(model, noisy)
    torch._dynamo.reset()
    compile_blocks(model.transformer, model.blocks, backend="eager")
    compile_decoder(model.pipe.vae.decoder, backend="eager")
    joined = {n for n, module in model.transformer.named_modules() if "forward" in vars(module)}
    assert {n for n in joined if "attn" in n} == {"blocks.0.attn1"}
    model.compiled = True
    compiled = drawn(model, noisy)
    assert gap(compiled.trace.clean, plain.trace.clean) < 1e-4
    assert gap(compiled.logp, plain.logp) < 1e-4


def test_decoding_in_tiles(wan: Path) -> None:
    """Videos of one tile do not change."""
    model = model_of(wan, vae_tiling=True)
    z = torch.randn(1, 4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    whole = model_of(wan).pixels(z)
    assert torch.equal(model.pixels(z), whole)
    model.pipe.vae.enable_tiling(16, 16, 8, 8)  # height, width, strides
    tiled = model.pixels(z)
    assert tiled.shape == whole.shape and not torch.equal(tiled, whole)


def test_memory_of_evaluations_of_another_size(wan: Path, tmp_path: Path) -> None:
    from gesso.estimate import estimate

    data = small_recipe(wan, tmp_path / "prompts.txt")
    size = {"height": HEIGHT, "width": WIDTH, "frames": 5, "text_length": 16}
    data["model"] = {"name": "wan", "path": str(wan), "lora": {"rank": 2, "alpha": 4}, **size}
    alike = estimate(build.recipe_from(data)).passing
    data["eval"] = {"frames": 9}
    larger = estimate(build.recipe_from(data)).passing
    assert alike.items() <= larger.items()
    for name in ("denoising", "decoding"):
        assert larger[f"{name} in evaluations"] > larger[name]


def test_memory_of_clips(wan: Path, tmp_path: Path) -> None:
    """All their frames are encoded."""
    from gesso.memory.flow import _works

    data = small_recipe(wan, tmp_path / "prompts.txt")
    data |= {"algorithm": {"name": "flow-sft"}, "sampler": {"batch": 1, "engine": "data"}}
    data["model"] = {"name": "wan", "path": str(wan), "frames": 5, "height": 16, "width": 32}
    recipe, model = build.recipe_from(data), model_of(wan, device="meta")
    latents = _works(model, build.algorithm(recipe), recipe)["encoding"]()
    assert isinstance(latents, torch.Tensor) and latents.shape == (1, 4, 2, 2, 4)


def test_a_plain_folder_is_sampled_with_the_defaults_of_the_pipeline(wan: Path) -> None:
    section = folders.recipe_of(wan).recipe.model
    assert section.name == "wan" and isinstance(section, Model)
    assert (section.height, section.width, section.frames) == (480, 832, 81)


def test_the_schedule_begins_at_exactly_one(wan: Path) -> None:
    """UniPC begins at .999999, where Flow-SDE's noise is unbounded."""
    from gesso.formulas.flow_steps import scales

    model = model_of(wan)
    for steps in (1, 4, 10, 50):
        sigmas = model.sigmas(steps, HEIGHT, WIDTH, FRAMES)
        model.pipe.scheduler.set_timesteps(steps)
        assert sigmas[0] == 1 and sigmas[-1] == 0 and len(sigmas) == steps + 1
        np.testing.assert_allclose(sigmas, model.pipe.scheduler.sigmas, atol=2e-6)
    _, std = scales("flow-sde", sigmas, range(50), 0.7)
    assert std.max() < 1


def test_timesteps_are_the_pipelines_integers(wan: Path) -> None:
    """Truncating float32 1000·σ misses some of them."""
    model = model_of(wan)
    model.pipe.scheduler.register_to_config(flow_shift=1.0)
    scheduler, missed = model.pipe.scheduler, 0
    for steps in range(1, 101):
        sigmas = model.sigmas(steps, HEIGHT, WIDTH, FRAMES)
        assert model.timestep(sigmas[:-1]).equal(scheduler.timesteps)
        missed += int(((scheduler.sigmas[1:-1] * 1000).long() != scheduler.timesteps[1:]).sum())
    assert missed > 0
    assert model.timestep(torch.ones(1)).tolist() == [999]


def test_frames_and_sizes_that_do_not_fit(wan: Path) -> None:
    model = model_of(wan)
    assert model.latent_shape(16, 32, 9) == (4, 3, 2, 4)
    for frames, nearest in ((8, 9), (2, 1), (7, 9), (34, 33)):
        with pytest.raises(UserError, match=f"{frames} frames: .* multiple of 4; use {nearest}$"):
            model.latent_shape(16, 32, frames)
    with pytest.raises(UserError, match="must be multiples of 16; use 16×48"):
        model.latent_shape(17, 41, 9)

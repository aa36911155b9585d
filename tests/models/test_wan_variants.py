"""Wan 2.2 and image to video against diffusers' own pipelines."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gesso import build, run
from gesso.config import Learner as LearnerSection
from gesso.config import Lora, Model, Optimizer
from gesso.estimate import estimate
from gesso.learner.learner import Learner
from gesso.models.flow.base import PromptCache
from gesso.models.flow.wan import Wan
from gesso.samplers.denoise import DenoisingSampler, Piece
from gesso.types import Prompt, PromptImage, SampleSpec, Size, UserError
from gesso.use import usage
from tests import pipelines
from tests.conftest import small_recipe
from tests.models.test_pipelines import stirred
from tests.models.test_wan import drawn as drawn_from_text
from tests.models.test_wan import euler, gap, model_of, text_pipe, theirs

STEPS = 4  # one of them below the boundary of the experts
SIZES = {"wan-ti2v": (32, 64, 9)}
SECOND = {"wan-experts": 9.0, "wan-i2v-experts": 9.0}  # guidance scale of the second expert


def picture(seed: int, height: int = 16, width: int = 32) -> PromptImage:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "png")
    return PromptImage(data=file.getvalue())


def size_of(name: str) -> Size:
    return Size(*SIZES.get(name, (16, 32, 9)))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = pipelines.build(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


def prompts_of(name: str) -> list[Prompt]:
    height, width, _ = size_of(name)
    texts = [("a red cat", "dull"), ("oak", "an oak tree")]
    return [
        Prompt(text, negative, images=(picture(i, height, width),))
        for i, (text, negative) in enumerate(texts)
    ]


def spec_of(name: str, **settings: Any) -> SampleSpec:
    height, width, frames = size_of(name)
    return SampleSpec(steps=STEPS, height=height, width=width, frames=frames, **settings)


def image_model(folder: Path, **settings: Any) -> Any:
    return model_of(folder, "wan-i2v", text_length=512, **settings)


def drawn(model: Any, name: str, spec: SampleSpec, prompts: list[Prompt] | None = None) -> Piece:
    (piece,) = DenoisingSampler(model, 4).sample(
        prompts or prompts_of(name), [0, 1], [11, 12], spec
    )
    return piece


def image_pipe(folder: Path) -> Any:
    from diffusers import WanImageToVideoPipeline

    return euler(WanImageToVideoPipeline.from_pretrained(folder), STEPS)


def from_image(pipe: Any, model: Any, name: str, kind: str, count: int = 2) -> list[Any]:
    """What the pipeline, which takes one image a call, generates from the seeds of `drawn`. Without
    ftfy it cannot encode texts."""
    height, width, frames = size_of(name)
    found = []
    for prompt, seed in list(zip(prompts_of(name), (11, 12), strict=True))[:count]:
        embeds = [
            model.encode([Prompt(text, images=prompt.images)], Size(height, width, frames)).embeds
            for text in (prompt.text, prompt.negative)
        ]
        found.append(
            pipe(
                image=prompt.images[0].open(), prompt_embeds=embeds[0],
                negative_prompt_embeds=embeds[1], height=height, width=width, num_frames=frames,
                num_inference_steps=STEPS, guidance_scale=3.5, guidance_scale_2=model.guidance_2,
                generator=torch.Generator().manual_seed(seed), output_type=kind,
            ).frames[0]
        )  # fmt: skip
    return found


@pytest.mark.parametrize("name", ["wan-ti2v", "wan-i2v", "wan-i2v-experts"])
def test_image_to_video_is_diffusers_own_pipeline(folder_of: Any, name: str) -> None:
    """Of the latents of TI2V the first frame is the image: only the others are sampled."""
    model = image_model(folder_of(name), guidance_2=SECOND.get(name))
    pipe = image_pipe(folder_of(name))
    piece = drawn(model, name, spec_of(name, guidance=3.5))
    latents = torch.stack(from_image(pipe, model, name, "latent"))
    free = latents[:, :, 1:] if name == "wan-ti2v" else latents
    assert gap(piece.trace.clean, free) < 2e-5
    (video,) = from_image(pipe, model, name, "np", 1)
    frames = piece.samples[0].frames
    assert frames.shape == (*size_of(name)[2:], *size_of(name)[:2], 3)
    assert abs(frames / 255.0 - video).max() <= 0.6 / 255
    others = [Prompt(p.text, p.negative, images=(picture(9),)) for p in prompts_of(name)]
    assert gap(drawn(model, name, spec_of(name, guidance=3.5), others).trace.clean, free) > 1e-3


@pytest.mark.parametrize("name", ["wan-ti2v", "wan-experts"])
def test_text_to_video_is_diffusers_own_pipeline(folder_of: Any, name: str) -> None:
    """TI2V gets one timestep per row instead of one per token. The experts share a schedule."""
    model = model_of(folder_of(name), guidance_2=SECOND.get(name))
    pipe = euler(text_pipe(folder_of(name)), STEPS)
    height, width, frames = size_of(name)
    size = {"height": height, "width": width, "num_frames": frames, "num_inference_steps": STEPS}
    ours = drawn_from_text(model, spec_of(name, guidance=3.5)).trace.clean
    expected = theirs(pipe, "latent", 3.5, guidance_scale_2=model.guidance_2, **size)
    assert gap(ours, expected) < 1e-5
    if model.guidance_2 is not None:
        assert gap(ours, theirs(pipe, "latent", 3.5, **size)) > 1e-2


def test_rows_of_both_experts_in_a_batch(folder_of: Any) -> None:
    """Each row runs through the expert of its timestep, in any order."""
    model = model_of(folder_of("wan-experts"))
    cond = PromptCache(model)([Prompt("a"), Prompt("b"), Prompt("c")], Size(16, 32, 9))
    x = torch.randn(3, 4, 3, 2, 4, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.5, 0.95, 0.6])
    with torch.no_grad():
        together = model.velocity(x, sigma, cond)
        for i in range(3):
            index = torch.tensor([i])
            alone = model.velocity(x[index], sigma[index], cond.rows(index))
            assert gap(together[index], alone) < 1e-5
            network = model.pipe.transformer if i == 1 else model.pipe.transformer_2
            inputs = model.inputs(x[index], sigma[index], cond.rows(index))
            assert gap(alone, network(**inputs, return_dict=False)[0]) < 1e-6


def test_a_second_scale_without_guidance(folder_of: Any, tmp_path: Path) -> None:
    data = small_recipe(folder_of("wan-experts"), tmp_path / "prompts.txt")
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    data["model"] |= {
        "name": "wan",
        "height": 16,
        "width": 32,
        "text_length": 16,
        "guidance_2": 3.0,
    }
    for guidance, notes in ((1.0, 1), (4.0, 0)):
        data["eval"] = {"guidance": guidance}
        job = run.assemble(build.recipe_from(data))
        job.close()
        found = [note for note in job.notes if "guidance_2 = 3 is not used" in note]
        assert len(found) == notes


def test_models_of_configs_alone(folder_of: Any) -> None:
    """The estimate of memory has both experts, and the pinned frame."""
    model = model_of(folder_of("wan-experts"), device="meta", guidance_2=3.0)
    assert {name.split(".")[0] for name, _ in model.network.named_parameters()} == {
        "transformer", "transformer_2"
    }  # fmt: skip
    assert image_model(folder_of("wan-ti2v"), device="meta").pinned


@pytest.mark.parametrize("name", ["wan-ti2v", "wan-i2v"])
def test_memory_of_image_to_video(folder_of: Any, name: str) -> None:
    height, width, _ = size_of(name)
    data = small_recipe(folder_of(name), Path("prompts.txt"))
    size = {"height": height, "width": width, "frames": 5}
    lora = {"rank": 2, "alpha": 4}
    data["model"] = {"name": "wan-i2v", "path": str(folder_of(name)), "lora": lora, **size}
    found = estimate(build.recipe_from(data)).passing
    assert found["denoising"] > 0 and found["update with gradients"] > 0


def test_each_expert_has_a_file_of_its_lora(folder_of: Any, tmp_path: Path) -> None:
    folder = folder_of("wan-experts")
    model, pipe = model_of(folder, lora=Lora(rank=2, alpha=6)), euler(text_pipe(folder), STEPS)
    ours = drawn_from_text(stirred(model), spec_of("wan")).trace.clean
    model.save(tmp_path / "lora")
    files = sorted(file.name for file in (tmp_path / "lora").iterdir())
    assert files == ["pytorch_lora_weights.safetensors", "pytorch_lora_weights_2.safetensors"]
    for line in usage._lora(model):  # of the model card
        assert gap(theirs(pipe, "latent", 1.0, num_inference_steps=STEPS), ours) > 1e-2
        exec(line, {"pipe": pipe, "folder": tmp_path / "lora"})
    assert gap(theirs(pipe, "latent", 1.0, num_inference_steps=STEPS), ours) < 1e-4
    again = model_of(folder, lora=Lora(rank=2, alpha=6, path=str(tmp_path / "lora")))
    assert torch.equal(drawn_from_text(again, spec_of("wan")).trace.clean, ours)
    model.save(tmp_path / "whole", merged=True)
    whole = euler(text_pipe(tmp_path / "whole"), STEPS)
    assert gap(theirs(whole, "latent", 1.0, num_inference_steps=STEPS), ours) < 1e-4


def test_the_first_frame_is_no_part_of_the_log_prob(folder_of: Any) -> None:
    """An update over image prompts: replayed log-probs are those of sampling."""
    from gesso.algorithms.flow_grpo import FlowGRPO
    from gesso.rollout import Rollout
    from gesso.types import Score

    algorithm = FlowGRPO(name="flow-grpo", updates=1, group=2, steps=3, guidance=2.0)
    model = stirred(image_model(folder_of("wan-ti2v"), lora=Lora(rank=2, alpha=4)))
    height, width, frames = size_of("wan-ti2v")
    spec = algorithm.spec(0, 0, Model(path="", height=height, width=width, frames=frames))
    prompts = prompts_of("wan-ti2v")
    (piece,) = DenoisingSampler(model, 4).sample(prompts, [0, 0, 1, 1], [1, 2, 3, 4], spec)
    assert piece.trace.latents.shape == (4, 3, 4, 2, 2, 4)
    scores = [Score(float(i), {"r": float(i)}) for i in range(4)]
    group = torch.tensor([0, 0, 1, 1])
    rollout = Rollout(piece.samples, group, piece.trace, piece.logp, 0, scores, {"r": 1.0})
    learner = Learner(model, algorithm, Optimizer(), LearnerSection(micro_batch=2), seed=0)
    metrics = learner.update(rollout, 0).metrics
    assert metrics["update/grad_norm"] > 0 and metrics["update/first_abs_dlogp_max"] < 1e-5


def test_a_given_clip_begins_with_the_input_image(folder_of: Any) -> None:
    """Of its latents the first frame is that of the encoded image, and not trained."""
    model, size = image_model(folder_of("wan-ti2v")), size_of("wan-ti2v")
    prompts = prompts_of("wan-ti2v")
    shape = len(prompts), size.frames, size.height, size.width, 3
    clips = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    clips[:, 0] = [prompt.images[0].fitted(size.height, size.width) for prompt in prompts]
    latents = model.encode_images(torch.from_numpy(clips))
    assert latents.shape[1:] == model.latent_shape(*size)
    whole = model.completed(latents, model.encode(prompts, size))
    expected = Wan.encode_images(model, torch.from_numpy(clips))
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)


def test_bad_input(folder_of: Any) -> None:
    with pytest.raises(UserError, match="requires 512 tokens; remove it"):
        model_of(folder_of("wan-i2v"), "wan-i2v", text_length=16)
    with pytest.raises(UserError, match=r'from text alone; set model\.name = "wan"'):
        image_model(folder_of("wan-experts"))
    with pytest.raises(UserError, match=r"continues an image, got frames = 1; use at least 5"):
        image_model(folder_of("wan-ti2v")).latent_shape(32, 64)
    with pytest.raises(UserError, match=r"guidance_2 = 3 .* has one network; remove it"):
        model_of(folder_of("wan-ti2v"), guidance_2=3.0)
    with pytest.raises(UserError, match="expects a WanPipeline; change one of them"):
        model_of(folder_of("wan-i2v"))

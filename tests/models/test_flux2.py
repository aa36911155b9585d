"""FLUX.2 and Z-Image: input images, and what is particular to their pipelines. What all models have
in common is in test_pipelines.py."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from gesso.config import Lora
from gesso.models.flow.base import PromptCache, check_images
from gesso.samplers.denoise import DenoisingSampler
from gesso.types import Prompt, PromptImage, SampleSpec, Size, UserError
from gesso.use.source import find
from tests import pipelines
from tests.models.test_pipelines import Tiny, gap

SIZE = (24, 16)  # of generated images
REFERENCES = [(64, 80), (70, 65)]  # of input images: height, width; the second is cropped
LAYERS = {"num_layers": 1, "num_single_layers": 1}


@pytest.fixture(scope="module")
def of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    root = tmp_path_factory.mktemp("flux2")

    def made(name: str) -> Tiny:
        if not (root / name).is_dir():
            pipelines.build(name, root / name, **(LAYERS if "flux2" in name else {"n_layers": 1}))
        return Tiny(name, root / name)

    return made


def picture(size: tuple[int, int], seed: int = 0) -> PromptImage:
    noise = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return PromptImage(data=file.getvalue())


PICTURES = tuple(picture(size, seed) for seed, size in enumerate(REFERENCES))


@pytest.mark.parametrize("name", ["flux2-dev", "flux2-klein"])
def test_input_images_are_those_of_the_pipeline(of: Callable[[str], Tiny], name: str) -> None:
    """Prompts with none, one and two images in one call, which the sampler takes apart."""
    tiny = of(name)
    model, pipe, scale = tiny.plain_model(), tiny.pipe(), 2.5
    prompts = [Prompt("a red cat", images=PICTURES[:n]) for n in range(3)]
    spec = SampleSpec(steps=2, height=SIZE[0], width=SIZE[1], guidance=scale)
    pieces = list(DenoisingSampler(model, 4).sample(prompts, [0, 1, 2], [1, 1, 1], spec))
    ours = torch.cat([piece.trace.clean for piece in pieces])
    for latents, prompt in zip(ours, prompts, strict=True):
        found = pipe(
            prompt=prompt.text, image=[image.open() for image in prompt.images] or None,
            height=SIZE[0], width=SIZE[1], num_inference_steps=2, guidance_scale=scale,
            max_sequence_length=16, generator=torch.Generator().manual_seed(1),
            output_type="latent",
        ).images  # fmt: skip
        assert gap(tiny.normalised(pipe, found, SIZE)[0], latents) < 2e-5
    assert gap(ours[0], ours[1]) > 0.1 and gap(ours[1], ours[2]) > 0.02


def test_input_images_are_not_part_of_the_velocity(of: Callable[[str], Tiny]) -> None:
    model = of("flux2-klein").plain_model()
    cond = PromptCache(model)([Prompt("a cat", images=PICTURES)] * 2, Size(*SIZE))
    assert cond.layouts == (((16, 20), (17, 16)),) * 2
    assert cond.source is not None and cond.source.shape == (2, 16 * 20 + 17 * 16, model.channels)
    x = torch.randn(2, *model.latent_shape(*SIZE))
    assert model.velocity(x, torch.full((2,), 0.5), cond).shape == x.shape


def test_large_input_images_are_shrunk_as_in_the_pipeline(
    of: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1024² pixels, or less for smaller outputs; here the autoencoder is not run on them."""
    model, seen = of("flux2-klein").model(height=1024, width=1024), []

    def latents(pixels: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(pixels.shape))
        return torch.zeros(1, model.channels, 181, 362)

    monkeypatch.setattr(model, "latents", latents)
    prompt = Prompt("a cat", images=(picture((1000, 2000)),))
    model.encode([prompt], Size(*SIZE))
    model.area = 512**2
    model.encode([prompt], Size(*SIZE))
    assert seen == [(1, 3, 724, 1448), (1, 3, 360, 724)]


@pytest.mark.parametrize(
    "size, told", [((60, 100), "Image too small: 100×60"), ((64, 640), "Aspect ratio too extreme")]
)
def test_input_images_that_the_pipeline_refuses(
    of: Callable[[str], Tiny], size: tuple[int, int], told: str
) -> None:
    prompt = Prompt("a cat", images=(picture(size),), where="train.jsonl:3")
    model = of("flux2-klein").plain_model()
    with pytest.raises(UserError, match=f"train.jsonl:3: input image: {told}"):
        model.encode([prompt], Size(*SIZE))
    with pytest.raises(UserError, match=r"train.jsonl:3: image 1 of 1 has .* pixels; expected"):
        check_images(model, [prompt])
    check_images(model, [replace(prompt, images=(picture((64, 512)),))])  # both limits


def test_the_single_blocks_output_is_another_kind_of_layer(of: Callable[[str], Tiny]) -> None:
    """`attn.to_out` is a list in the other blocks, which PEFT refuses; the full names work."""
    tiny = of("flux2-klein")
    with pytest.raises(UserError, match=r"model.lora.targets.*attn.to_out"):
        tiny.model(lora=Lora(rank=4, targets=["attn.to_out"]))
    name = "single_transformer_blocks.0.attn.to_out"
    model = tiny.model(lora=Lora(rank=4, targets=[name]))
    assert {layer.rpartition(".lora")[0] for layer in model.policy.trainable} == {name}


def test_a_folder_of_z_image_has_the_guidance_of_its_pipeline(of: Callable[[str], Tiny]) -> None:
    """Scale s of the pipeline, by default 5, is c + s·(c − u)."""
    assert find(of("z-image").folder).recipe.eval.guidance == 6.0


def test_z_image_cuts_long_texts(of: Callable[[str], Tiny]) -> None:
    prompts = [Prompt("a cat"), Prompt("a red cat")]
    cond = of("z-image").plain_model().encode(prompts, Size(*SIZE))
    assert cond.mask is not None and cond.mask.sum(1).tolist() == [12, 16]  # cut at 16


def test_z_image_compiled_pads_behind_a_mask(of: Callable[[str], Tiny]) -> None:
    """What is behind the mask does not matter, nor how a batch is composed."""
    tiny = of("z-image")
    model, padded = tiny.plain_model(), tiny.model(text_length=80)
    padded.before_compiling()  # nothing is compiled here
    cond = PromptCache(tiny.model(text_length=80))(
        [Prompt("a cat" * 9), Prompt("oak")], Size(*SIZE)
    )
    assert cond.mask is not None and cond.mask.sum(1).tolist() == [52, 10]
    x = torch.randn(2, *model.latent_shape(*SIZE), generator=torch.Generator().manual_seed(0))
    sigma, alone = torch.tensor([0.9, 0.3]), torch.tensor([1])
    with torch.no_grad():
        expected = model.velocity(x, sigma, cond)
        assert gap(padded.velocity(x, sigma, cond), expected) < 1e-5
        assert gap(padded.velocity(x[1:], sigma[1:], cond.rows(alone)), expected[1:]) < 1e-5
        noise = torch.where(cond.mask[..., None], cond.embeds, 5.0)
        assert torch.equal(model.velocity(x, sigma, replace(cond, embeds=noise)), expected)

"""Samples of the data: images as they are trained on, scores, and prompts without samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gesso import build
from gesso.cluster.channel import pack_prompts, read_prompts
from gesso.rewards.transport.service import RewardService
from gesso.samplers.given import GivenImages
from gesso.types import Prompt, PromptImage, UserError
from tests.tokens import picture

SIZE = (32, 48)


def stripes(folder: Path, height: int, width: int) -> PromptImage:
    """Vertical thirds: red, green, blue."""
    pixels: np.ndarray = np.zeros((height, width, 3), np.uint8)
    for third, part in enumerate(np.array_split(np.arange(width), 3)):
        pixels[:, part, third] = 255
    file = folder / f"{height}x{width}.png"
    Image.fromarray(pixels).save(file)
    return PromptImage(str(file))


def test_an_image_of_the_right_size_is_not_changed() -> None:
    image = picture(*SIZE)
    assert np.array_equal(image.fitted(*SIZE), np.asarray(image.open()))


def test_images_are_cropped_around_their_centre_and_resized(tmp_path: Path) -> None:
    wide = stripes(tmp_path, 64, 288).fitted(32, 48)  # three halves of the height: 96 of 288
    assert wide.shape == (32, 48, 3)
    assert wide[:, 1:-1, 1].min() > 250 and wide[:, 1:-1, 0].max() < 5
    tall = stripes(tmp_path, 200, 24).fitted(32, 48)  # enlarged, its whole width
    assert tall[:, 2, 0].min() > 200 and tall[:, 24, 1].min() > 200 and tall[:, -3, 2].min() > 200


@pytest.fixture
def sampler(recipe_data: dict[str, Any]) -> GivenImages:
    recipe_data |= {"algorithm": {"name": "flow-dpo", "group": 2, "guidance": 1.0}}
    recipe_data |= {"sampler": {"engine": "data", "batch": 3}}
    recipe = build.recipe_from(recipe_data)
    built = build.sampler(recipe, build.algorithm(recipe), build.model(recipe))
    assert isinstance(built, GivenImages)
    return built


def test_samples_scores_and_traces(sampler: GivenImages, recipe_data: dict[str, Any]) -> None:
    recipe = build.recipe_from(recipe_data)
    spec = build.algorithm(recipe).spec(0, 0, recipe.model)
    prompts = [
        Prompt(f"p{i}", given=tuple(picture(*SIZE, seed=10 * i + k) for k in range(2)))
        for i in range(2)
    ]
    prompts = read_prompts(pack_prompts(prompts))  # as workers get them
    row, seeds = [0, 0, 1, 1], [1, 2, 3, 4]
    pieces = list(sampler.sample(prompts, row, seeds, spec))
    assert [piece.index for piece in pieces] == [[0, 1, 2], [3]]
    samples = [sample for piece in pieces for sample in piece.samples]
    images = [image for prompt in prompts for image in prompt.all_images]
    for sample, image in zip(samples, images, strict=True):
        assert np.array_equal(sample.pixels, np.asarray(image.open()))
    assert [s.seed for s in samples] == seeds and [s.prompt.text for s in samples] == [
        "p0", "p0", "p1", "p1"
    ]  # fmt: skip
    clean = torch.cat([piece.trace.clean for piece in pieces])
    for i, sample in enumerate(samples):
        alone = sampler.model.encode_images(torch.from_numpy(sample.pixels.copy())[None])
        torch.testing.assert_close(clean[i : i + 1], alone, rtol=1e-4, atol=1e-5)
    assert pieces[0].trace.steps.shape == (3, 0) and pieces[0].logp.shape == (3, 0)
    service = RewardService([])
    try:
        scores = service.score(samples)
    finally:
        service.close()
    assert [score.value for score in scores] == [1, 0, 1, 0] and all(s.ok for s in scores)
    (part,) = sampler.sample(prompts, row, seeds, spec, only=range(3, 4))  # of a worker
    assert part.trace.clean.equal(pieces[1].trace.clean) and part.samples[0].given == 0

    (drawn,) = sampler.sample([Prompt("a cat")], [0], [7], spec)  # of an evaluation
    (expected,) = sampler.inner.sample([Prompt("a cat")], [0], [7], spec)
    assert drawn.samples[0].given is None
    assert np.array_equal(drawn.samples[0].pixels, expected.samples[0].pixels)


def test_an_image_that_is_gone(
    sampler: GivenImages, recipe_data: dict[str, Any], tmp_path: Path
) -> None:
    recipe = build.recipe_from(recipe_data)
    spec = build.algorithm(recipe).spec(0, 0, recipe.model)
    image = PromptImage(str(tmp_path / "gone.png"))
    prompt = Prompt("a", where="a.jsonl:3", given=(image, image))
    with pytest.raises(UserError, match=r"a\.jsonl:3: .*gone\.png cannot be read"):
        list(sampler.sample([prompt], [0, 0], [1, 2], spec))

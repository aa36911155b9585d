"""The sampler against diffusers' own pipeline, and replay against sampling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gesso import build
from gesso.algorithms.base import Prepared
from gesso.config import Recipe
from gesso.models.flow.base import FlowModel
from gesso.rollout import Rollout
from gesso.samplers.base import parts
from gesso.samplers.denoise import DenoisingSampler, Piece, _Noise
from gesso.traces.flow import FlowTrace
from gesso.types import Prompt, PromptImage, ResponseSpec, SampleSpec, Score, Size, Which
from gesso.weights.trainable import lora_layers
from tests.conftest import PROMPTS
from tests.rollouts import SIZE, parts_of, rollout_of
from tests.typed import drawing, sure

ROWS, SEEDS = [0, 0, 1, 1, 2], [11, 12, 13, 14, 15]


def draw(sampler: DenoisingSampler, spec: SampleSpec) -> Piece:
    prompts = [Prompt(text) for text in PROMPTS]
    pieces = list(sampler.sample(prompts, ROWS, SEEDS, spec))
    return Piece(
        [i for p in pieces for i in p.index],
        [s for p in pieces for s in p.samples],
        FlowTrace.concat([p.trace for p in pieces]),
        torch.cat([p.logp for p in pieces]),
    )


def start_noise(model: FlowModel, seeds: list[int]) -> torch.Tensor:
    shape = model.latent_shape(32, 96)
    return torch.stack(
        [torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in seeds]
    )


def test_without_noise_it_is_diffusers_own_pipeline(recipe: Recipe) -> None:
    model = drawing(build.model(recipe))
    for guidance in (1.0, 3.0):
        spec = SampleSpec(steps=4, height=32, width=96, guidance=guidance)
        ours = draw(DenoisingSampler(model, 2), spec)
        model.pipe.set_progress_bar_config(disable=True)
        theirs = model.pipe(
            prompt=[PROMPTS[r] for r in ROWS],
            negative_prompt=[""] * len(ROWS),
            height=32,
            width=96,
            num_inference_steps=4,
            guidance_scale=guidance,
            max_sequence_length=0,
            latents=start_noise(model, SEEDS),
            output_type="latent",
        ).images
        assert (ours.trace.clean - theirs).abs().max() <= 1e-4
        pictures = model.pipe.vae.decode(
            theirs / model.pipe.vae.config.scaling_factor + model.pipe.vae.config.shift_factor
        ).sample
        pictures = model.pipe.image_processor.postprocess(pictures.detach(), output_type="np")
        for sample, picture in zip(ours.samples, pictures, strict=True):
            assert abs(sample.pixels / 255.0 - picture).max() <= 1 / 255 + 1e-6


def test_replay_gives_the_log_probs_of_sampling(recipe_data: dict) -> None:
    for rule, guidance in [("flow-sde", 1.0), ("flow-sde", 3.0), ("cps", 1.0), ("dance", 1.0)]:
        recipe_data["algorithm"] |= {"rule": rule, "guidance": guidance}
        recipe = build.recipe_from(recipe_data)
        model, algorithm = drawing(build.model(recipe)), build.algorithm(recipe)
        piece = draw(DenoisingSampler(model, 2), sure(SampleSpec, algorithm.spec(0, 7, SIZE)))
        assert piece.logp.shape == (5, 3) and piece.trace.latents.shape[1] == 4
        rollout = as_rollout(piece)
        with torch.no_grad():
            terms = algorithm.terms(rollout, Prepared(torch.ones(5)))
            stats = algorithm.loss(model, terms).stats
        assert stats["abs_dlogp"].max() < 1e-5
        assert piece.logp.std() > 1e-4  # not trivially equal


def test_a_window_is_stochastic_and_the_rest_is_not(recipe: Recipe) -> None:
    """Two runs that differ in the noise of the window only share every latent before it."""
    model = drawing(build.model(recipe))
    sampler = DenoisingSampler(model, 8)
    window = SampleSpec(
        steps=4, height=32, width=96, noise=0.7, stochastic=range(1, 3), trained=range(1, 3)
    )
    ode = SampleSpec(steps=4, height=32, width=96)
    noisy, plain = draw(sampler, window), draw(sampler, ode)
    one_step = SampleSpec(
        steps=4, height=32, width=96, noise=0.7, stochastic=range(3, 4), trained=range(3, 4)
    )
    late = draw(sampler, one_step)
    assert noisy.trace.latents.shape[1] == 3 and late.trace.latents.shape[1] == 2
    assert (noisy.trace.clean - plain.trace.clean).abs().max() > 1e-2
    # up to the window nothing is random: the ODE's latent at the same step is met exactly
    x = start_noise(model, SEEDS)
    sigmas = model.sigmas(4, 32, 96)
    cond = sampler.embeddings([Prompt(PROMPTS[r]) for r in ROWS], Size(32, 96))
    with torch.no_grad():
        v = model.velocity(x, sigmas[0].expand(5), cond)
    first = x + (sigmas[1] - sigmas[0]) * v
    assert (noisy.trace.latents[:, 0] - first).abs().max() < 1e-5


def test_an_image_does_not_depend_on_how_the_batch_is_cut(recipe: Recipe) -> None:
    model, algorithm = drawing(build.model(recipe)), build.algorithm(recipe)
    spec = sure(SampleSpec, algorithm.spec(0, 1, SIZE))
    whole, cut = draw(DenoisingSampler(model, 5), spec), draw(DenoisingSampler(model, 2), spec)
    assert (whole.trace.clean - cut.trace.clean).abs().max() < 1e-4
    assert (whole.logp - cut.logp).abs().max() < 1e-4


def test_every_prompt_is_encoded_once(recipe: Recipe) -> None:
    sampler = DenoisingSampler(drawing(build.model(recipe)), 2)
    spec = SampleSpec(steps=2, height=32, width=96, guidance=2.0)
    draw(sampler, spec)
    draw(sampler, spec)
    assert sampler.embeddings.encoded == len(PROMPTS) + 1  # and the empty negative prompt


def as_rollout(piece: Piece) -> Rollout:
    scores = [Score(float(i)) for i in range(len(piece.samples))]
    return Rollout(piece.samples, torch.tensor(ROWS), piece.trace, piece.logp, 0, scores, {})


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("weights", ["ema", "reference"])
def test_between_pieces_the_policy_is_unchanged(
    folding_data: dict, weights: Which, fold: bool
) -> None:
    """A generator stands still where it yields, and may never go on: within `using` the trained
    weights would be the copy's for as long, and a step of the optimizer would move that."""
    folding_data["model"]["fold"] = fold
    folding_data["learner"] = {"ema": {"every": 1}}
    model, algorithm, _ = parts_of(build.recipe_from(folding_data))
    policy = model.policy
    own = {name: p.data_ptr() for name, p in policy.trainable.items()}
    spec = replace(algorithm.spec(0, 0, SIZE), weights=weights)
    prompts = [Prompt(text) for text in PROMPTS]
    left = DenoisingSampler(model, 2).sample(prompts, ROWS, SEEDS, spec)
    next(left)
    assert {name: p.data_ptr() for name, p in policy.trainable.items()} == own
    assert all(p.requires_grad for p in policy.trainable.values())
    assert not any(layer.disable_adapters for layer in lora_layers(policy.module).values())
    left.close()
    with policy.folded():
        assert all(layer.folded is None for layer in policy.folding.layers.values())


def test_weights_are_folded_before_noise_is_sampled(
    folding_data: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU folds while the CPU draws."""
    model, algorithm, _ = parts_of(build.recipe_from(folding_data))
    folded: list[bool] = []
    drawn = _Noise.draw

    def watched(noise: _Noise) -> torch.Tensor:
        folded.append("current" in model.policy.folding.matrices)
        return drawn(noise)

    monkeypatch.setattr(_Noise, "draw", watched)
    rollout_of(model, algorithm)
    assert folded and all(folded)


def test_prompts_with_input_images_of_different_sizes_are_sampled_separately(
    tmp_path: Path,
) -> None:
    from PIL import Image

    for name, size in {"a": (8, 8), "b": (8, 8), "c": (16, 8)}.items():
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    prompts = [Prompt(n, images=(PromptImage(str(tmp_path / f"{n}.png")),)) for n in "abc"]
    spec, row = SampleSpec(steps=1, height=8, width=8), [0, 0, 1, 2, 2, 0]
    assert parts(row, 4, spec, prompts) == [range(3), range(3, 5), range(5, 6)]
    assert parts([0, 2, 1], 4, spec, prompts) == [range(1), range(1, 2), range(2, 3)]
    assert parts(row, 4, spec, prompts[:1] * 3) == [range(4), range(4, 6)]
    assert parts(row, 4, ResponseSpec(8), prompts) == parts(row, 4, ResponseSpec(8))

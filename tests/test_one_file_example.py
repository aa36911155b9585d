"""examples/flow_grpo_in_one_file.py computes what Gesso computes: samples, log-probs, advantages
and gradients, from the same weights, prompts and noise.

Both run in float32 but order the arithmetic differently: latents (up to 5) and log-probs (about −1)
agree to 5e-6, gradients to 1e-5 of the largest entry of their parameter.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from gesso import build
from gesso.algorithms.advantage import Advantage
from gesso.rollout import Rollout
from gesso.types import Score, seed_of
from tests.conftest import PROMPTS, small_recipe
from tests.rollouts import parts_of, rollout_of, scored_rollout

FILE = Path(__file__).parent.parent / "examples" / "flow_grpo_in_one_file.py"
GROUPS, GROUP, STEPS = 2, 3, 4  # of the small recipe; the last step is not trained
SEEDS = range(GROUPS * GROUP)  # of the samples of `rollout_of`
REWARDS = [0.1, 0.9, 0.4, 0.9, 0.6, 0.7]  # groups of different means; both updates have both signs
CLIP = 2e-3  # comparable to what an optimizer step changes: clips some ratios, not all
OFF_POLICY = (0.01, -0.01, 0.001)  # added to old log-probs: the ratio is below, above, within
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location(FILE.stem, FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@dataclass(frozen=True)
class Case:
    beta: float = 0.0
    shift: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of the old log-probs, by trained step


@dataclass(frozen=True)
class Iteration:
    """One iteration by Gesso, with two updates, and the example's pipeline."""

    case: Case
    rollout: Rollout  # as sampled
    advantages: Tensor  # (N,)
    rows: list[Tensor]  # the samples of each update
    weights: list[Weights]  # before each update
    gradients: list[Weights]  # of each update
    metrics: dict[str, float]
    pipe: Any
    reference: torch.nn.Module


@pytest.fixture(
    scope="module",
    params=[Case(), Case(beta=60.0), Case(shift=OFF_POLICY)],
    ids=["without KL", "with KL", "other log-probs"],
)
def iteration(
    request: pytest.FixtureRequest, example: ModuleType, pipeline_folder: Path, prompt_file: Path
) -> Iteration:
    case = request.param
    data = small_recipe(pipeline_folder, prompt_file)
    data["algorithm"] |= {"updates": 2, "clip": CLIP, "beta": case.beta}
    data["optimizer"] = {"lr": 1e-3}
    recipe = build.recipe_from(data)
    model, algorithm, learner = parts_of(recipe)
    pipe = example.Pipeline.from_pretrained(pipeline_folder, text_encoder_3=None, tokenizer_3=None)
    reference = copy.deepcopy(pipe.transformer).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # away from the reference, so that the KL has a gradient
        for parameter in pipe.transformer.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    learner.policy.load(dict(pipe.transformer.named_parameters()))

    weights: list[Weights] = []
    gradients: list[Weights] = []

    def record(*_: object) -> None:
        trainable = learner.policy.trainable
        weights.append({name: p.detach().clone() for name, p in trainable.items()})
        gradients.append({name: p.grad.clone() for name, p in trainable.items()})

    learner.optimizer.register_step_pre_hook(record)
    rollout = replace(rollout_of(model, algorithm), scores=[Score(r) for r in REWARDS])
    shifted = replace(rollout, logp=rollout.logp + torch.tensor(case.shift))
    metrics = learner.update(shifted, 0).metrics
    order = torch.Generator().manual_seed(seed_of(recipe.seed, "update", 0))
    rows = torch.randperm(GROUPS * GROUP, generator=order).tensor_split(2)
    advantages = algorithm.advantage(rollout)
    return Iteration(
        case, rollout, advantages, list(rows), weights, gradients, metrics, pipe, reference
    )


def noise_of(shape: tuple[int, ...]) -> Tensor:
    """(T+1, N, C, H, W): Gesso's noise, a generator per sample, one draw per step."""
    streams = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    draws = [[torch.randn(shape, generator=s) for s in streams] for _ in range(STEPS + 1)]
    return torch.stack([torch.stack(draw) for draw in draws])


def sampled(example: ModuleType, iteration: Iteration) -> Any:
    """The example's rollout."""
    pipe = iteration.pipe
    load(pipe.transformer, iteration.weights[0])
    text = example.encode(pipe, PROMPTS[:GROUPS], GROUP)
    noise = noise_of(tuple(iteration.rollout.flow_trace.clean.shape[1:]))
    return example.sample(pipe.transformer, text, example.schedule(pipe, STEPS), noise, 0.7)


def load(module: torch.nn.Module, weights: Weights) -> None:
    missing, unexpected = module.load_state_dict(weights, strict=False)
    assert missing == ["pos_embed.pos_embed"] and not unexpected  # a buffer, not trained


def test_samples_and_log_probs_are_equal(example: ModuleType, iteration: Iteration) -> None:
    rollout, context = sampled(example, iteration), iteration.rollout.flow_trace.context
    trace, tolerance = iteration.rollout.flow_trace, {"rtol": 0.0, "atol": 5e-6}
    assert torch.equal(rollout.sigmas, context.sigmas)
    assert_close(rollout.text[0], context.cond.embeds[trace.row], **tolerance)
    assert context.cond.pooled is not None
    assert_close(rollout.text[1], context.cond.pooled[trace.row], **tolerance)
    assert trace.latents.shape[1] == STEPS and rollout.latents.shape[1] == STEPS + 1
    assert_close(rollout.latents[:, :-1], trace.latents, **tolerance)
    assert_close(rollout.latents[:, -1], trace.clean, **tolerance)
    assert_close(rollout.logp[:, :-1], iteration.rollout.logp, **tolerance)


def test_images_are_equal(example: ModuleType, iteration: Iteration) -> None:
    images = example.decode(iteration.pipe, iteration.rollout.flow_trace.clean)
    for image, sample in zip(images, iteration.rollout.samples, strict=True):
        assert (image == sample.pixels).all()


def test_advantages_are_equal(example: ModuleType, iteration: Iteration) -> None:
    rewards = torch.tensor(REWARDS, dtype=torch.float64).view(GROUPS, GROUP)
    assert_close(example.advantages(rewards).flatten(), iteration.advantages, rtol=1e-12, atol=0)


def test_large_advantages_are_clamped_alike(example: ModuleType) -> None:
    rewards = torch.zeros(2, 16, dtype=torch.float64)
    rewards[0, 3] = 1.0
    rollout = scored_rollout([[r] for r in rewards.flatten().tolist()], [0] * 16 + [1] * 16)
    advantages = example.advantages(rewards).flatten()
    assert advantages.max() == 5.0
    assert_close(advantages, Advantage()(rollout), rtol=1e-12, atol=0)


@pytest.mark.parametrize("number", [0, 1], ids=["first update", "second update"])
def test_gradients_are_equal(example: ModuleType, iteration: Iteration, number: int) -> None:
    """In the second update the policy has moved, and ratios are clipped."""
    case, policy = iteration.case, iteration.pipe.transformer
    rollout = sampled(example, iteration)
    rollout = replace(rollout, logp=rollout.logp + torch.tensor([*case.shift, 0.0]))
    rows, adv = iteration.rows[number], iteration.advantages.float()
    load(policy, iteration.weights[number])
    optimizer = torch.optim.AdamW(policy.parameters())
    config = example.Config(noise=0.7, clip=CLIP, beta=case.beta)
    example.update(policy, iteration.reference, optimizer, rollout.rows(rows), adv[rows], config)
    assert {name for name, _ in policy.named_parameters()} == iteration.gradients[number].keys()
    for name, parameter in policy.named_parameters():
        expected = iteration.gradients[number][name]
        largest = float(expected.abs().max())
        assert_close(
            parameter.grad, expected, rtol=0, atol=1e-5 * largest, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_cases_are_not_trivial(iteration: Iteration) -> None:
    """Some ratios are clipped and others are not, for both signs of the advantage; with the KL, the
    gradient's norm is clipped, too."""
    metrics, case = iteration.metrics, iteration.case
    assert 0 < metrics["update/clipped"] < 1
    for rows in iteration.rows:
        assert iteration.advantages[rows].min() < 0 < iteration.advantages[rows].max()
    if case.shift == OFF_POLICY:
        assert metrics["update/first_clipped"] == pytest.approx(1 / 3)
    if case.beta > 0:
        assert metrics["update/kl"] > 1e-3 and metrics["update/grad_norm"] > 1


def test_the_file_is_short_and_does_not_import_gesso() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    packages = {name.partition(".")[0] for name in imported}
    assert {"torch", "diffusers"} <= packages and "gesso" not in packages


def test_main_trains_and_saves_a_sheet(
    example: ModuleType,
    pipeline_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from PIL import Image

    sheet, batches, update = tmp_path / "sheet.png", [], example.update

    def recorded(*arguments: Any) -> None:
        batches.append(arguments[3:5])
        update(*arguments)

    monkeypatch.setattr(example, "update", recorded)
    options = {"model": pipeline_folder, "out": sheet, "iterations": 2, "groups": 2, "group": 2}
    options |= {"steps": 2, "beta": 0.1, "lr": 0.01}
    example.main([f"--{name}={value}" for name, value in options.items()])
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "held-out reward before training",
        "iteration  0",
        "iteration  1",
    ]
    before, after = np.split(np.asarray(Image.open(sheet)), 2, axis=1)
    assert before.shape == (8 * 32, 96, 3) and (before != after).any()

    # Each advantage belongs to its sample: computed again from the samples of both updates.
    pipe = example.Pipeline.from_pretrained(pipeline_folder, text_encoder_3=None, tokenizer_3=None)
    assert len(batches) == 4
    for first, second in (batches[:2], batches[2:]):
        latents = torch.cat([batch.latents[:, -1] for batch, _ in (first, second)])
        prompts = torch.cat([batch.text[1] for batch, _ in (first, second)])
        grouped = prompts.unique(dim=0, return_inverse=True)[1].argsort()
        rewards = example.reward(example.decode(pipe, latents[grouped])).view(2, 2)
        adv = torch.cat([first[1], second[1]])[grouped]
        assert_close(adv, example.advantages(rewards).flatten().float(), rtol=1e-3, atol=1e-3)
        assert adv.abs().max() > 0.1

"""Real rollouts of the small test recipe, with made-up scores."""

from __future__ import annotations

import numpy as np
import torch

from gesso import build, config
from gesso.algorithms.base import Algorithm
from gesso.config import Recipe
from gesso.learner.learner import Learner
from gesso.models.flow.base import FlowModel
from gesso.models.flow.pipeline import PipelineModel
from gesso.rollout import Rollout
from gesso.samplers.denoise import DenoisingSampler
from gesso.traces.flow import Conditioning, FlowContext, FlowTrace
from gesso.types import Prompt, Sample, Score
from tests.conftest import PROMPTS
from tests.typed import drawing

SIZE = config.Model(path="", height=32, width=96)
HALF = config.Model(path="", height=16, width=48)
REWARDS = [0.1, 0.9, 0.4, 0.3, 0.3, 0.8]


def rollout_of(
    model: FlowModel,
    algorithm: Algorithm,
    seed: int = 0,
    batch: int = 4,
    version: int = 0,
    size: config.Model | None = None,
) -> Rollout:
    """2 prompts × 3 samples, of 8×24 latent cells unless a size is given: tests/pipelines.py has
    twice as many cells a pixel as the bundled model."""
    if size is None:
        size = SIZE if model.latent_shape(SIZE.height, SIZE.width)[1:] == (8, 24) else HALF
    sampler = DenoisingSampler(model, batch)
    row = [0, 0, 0, 1, 1, 1]
    pieces = list(
        sampler.sample(
            [Prompt(t) for t in PROMPTS[:2]],
            row,
            [seed * 100 + i for i in range(6)],
            algorithm.spec(0, seed, size),
        )
    )
    return Rollout(
        samples=[s for p in pieces for s in p.samples],
        group=torch.tensor(row),
        trace=FlowTrace.concat([p.trace for p in pieces]),
        logp=torch.cat([p.logp for p in pieces]),
        version=version,
        scores=[Score(r, {"made-up": r}) for r in REWARDS],
        weights={"made-up": 1.0},
    )


def scored_rollout(rewards: list[list[float]], group: list[int]) -> Rollout:
    """Scores only: N samples with R rewards "0", "1", … each of weight 1, and an empty trace."""
    names = [str(i) for i in range(len(rewards[0]))]
    n = len(group)
    empty, zeros = torch.empty(n, 0, 1, 1, 1), torch.zeros(n, dtype=torch.long)
    sample = Sample(Prompt(PROMPTS[0]), np.zeros((1, 1, 3), np.uint8), 0)
    context = FlowContext(torch.tensor([1.0, 0.0]), Conditioning(torch.zeros(1, 1, 1)), None)
    return Rollout(
        samples=[sample] * n,
        group=torch.tensor(group),
        trace=FlowTrace(context, zeros, zeros.view(n, 1)[:, :0], empty, empty, empty),
        logp=torch.empty(n, 0),
        version=0,
        scores=[Score(sum(r), dict(zip(names, r, strict=True))) for r in rewards],
        weights=dict.fromkeys(names, 1.0),
    )


def parts_of(recipe: Recipe) -> tuple[PipelineModel, Algorithm, Learner]:
    model, algorithm = drawing(build.model(recipe)), build.algorithm(recipe)
    return (
        model,
        algorithm,
        Learner(model, algorithm, recipe.optimizer, recipe.learner, recipe.seed),
    )

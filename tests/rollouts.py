"""Real rollouts of the small test recipe, with made-up scores."""

from __future__ import annotations

import torch

from gesso import build
from gesso.algorithms.base import Algorithm
from gesso.config import Recipe
from gesso.learner.learner import Learner
from gesso.models.flow.base import FlowModel
from gesso.samplers.denoise import DenoisingSampler
from gesso.types import FlowTrace, Prompt, Rollout, Score
from tests.conftest import PROMPTS

REWARDS = [0.1, 0.9, 0.4, 0.3, 0.3, 0.8]


def rollout_of(model: FlowModel, algorithm: Algorithm, seed: int = 0) -> Rollout:
    """2 prompts × 3 samples."""
    sampler = DenoisingSampler(model, 4)
    row = [0, 0, 0, 1, 1, 1]
    pieces = list(
        sampler.sample(
            [Prompt(t) for t in PROMPTS[:2]],
            row,
            [seed * 100 + i for i in range(6)],
            algorithm.spec(seed, 32, 96),
        )
    )
    return Rollout(
        samples=[s for p in pieces for s in p.samples],
        group=torch.tensor(row),
        trace=FlowTrace.concat([p.trace for p in pieces]),
        logp=torch.cat([p.logp for p in pieces]),
        version=0,
        scores=[Score(r) for r in REWARDS],
    )


def parts_of(recipe: Recipe) -> tuple[FlowModel, Algorithm, Learner]:
    model, algorithm = build.model(recipe), build.algorithm(recipe)
    return (
        model,
        algorithm,
        Learner(model, algorithm, recipe.optimizer, recipe.learner, recipe.seed),
    )

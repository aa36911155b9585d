"""Estimates the device memory of a recipe, without weights and without the device.

The networks are built on torch's meta device, which has shapes and no numbers. What a run does with
them (an update of one micro-batch, sampling one batch) runs there once, and every tensor is counted
from its allocation to its end. Not included: the allocator's rounding, the CUDA context (some
hundred MB), and rewards, which run in other processes.

The families say what a run does (`memory/flow.py`, `memory/tokens.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gesso import build, families
from gesso.config import Recipe
from gesso.memory.meta import peak
from gesso.types import UserError

MASTER = 4  # bytes: trained weights, their gradients and both of Adam's moments are float32


@dataclass(frozen=True)
class Memory:
    """Bytes. `lasting` is allocated all the time; of `passing` one at a time: gradients are freed
    before the next batch is sampled. `host` is the most that is kept in the host's memory."""

    lasting: dict[str, int]
    passing: dict[str, int]
    host: dict[str, int]
    copy: int  # of the policy's trained weights, once

    @property
    def peak(self) -> int:
        return sum(self.lasting.values()) + max(self.passing.values())


def estimate(recipe: Recipe) -> Memory:
    section = recipe.model.model_copy(update={"device": "meta", "quantize": None})
    bare = recipe.model_copy(update={"model": section})
    model, algorithm = build.model(bare), build.algorithm(recipe)
    family = families.of(recipe)
    algorithm, critic = family.add_critic(bare, algorithm, model)
    critic_parameters = critic.trained if critic is not None else {}
    if not family.wraps_library(model):
        raise UserError(
            f'memory of model "{recipe.model.name}" cannot be worked out: only of diffusers '
            "pipelines that derive from PipelineModel, and of transformers' models"
        )
    load = family.memory_load(recipe, algorithm, model)
    policy = model.policy
    trained = (policy.size + sum(p.numel() for p in critic_parameters.values())) * MASTER
    for copy in (*algorithm.needs, *(("ema",) if recipe.learner.ema else ())):
        policy.snapshot(copy)
    lasting = {
        **load.networks,
        "optimizer": 2 * trained,
        "copies of the trained weights": len(policy.copies) * policy.size * MASTER,
        "stored samples": load.stored,
    }
    there = [*load.tensors, *(t for copy in policy.copies.values() for t in copy.values())]
    for parameter in (*policy.trainable.values(), *critic_parameters.values()):
        parameter.grad = torch.empty_like(parameter)  # as they are from the second micro-batch on
        there += [parameter, parameter.grad]
    passing = {"update with gradients": trained + peak(there, load.update)}
    passing |= {name: peak(there, work) for name, work in load.works.items()}
    nonzero = {name: size for name, size in lasting.items() if size}
    return Memory(nonzero, passing, load.host, policy.size * MASTER)

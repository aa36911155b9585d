"""Memory of image models: an update, a sampling step, decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gesso.algorithms.base import Algorithm, Prepared
from gesso.config import Recipe
from gesso.memory.meta import Load, nbytes, tensors_of
from gesso.models.flow.base import Gradient, guided
from gesso.models.flow.pipeline import PipelineModel, quiet
from gesso.rollout import FlowContext, FlowTrace, Rollout
from gesso.types import SampleSpec


def load(model: PipelineModel, algorithm: Algorithm, recipe: Recipe) -> Load:
    networks = _networks(model, recipe)
    networks["weights with the LoRA in them"] = _folded(model, algorithm, recipe)
    if model.runs_in_half:  # autocast keeps the weights a second time, in half precision
        networks["weights in half precision"] = model.policy.size * 2
        with quiet():
            model.policy.module.to(model.dtype)
    samples = recipe.data.groups * algorithm.group
    return Load(
        networks,
        stored=_stored(model, _spec(algorithm, recipe), samples),
        tensors=tensors_of(p for p in model.pipe.components.values() if isinstance(p, nn.Module)),
        update=_update(model, algorithm, recipe),
        works=_works(model, algorithm, recipe),
        host={},
    )


def _spec(algorithm: Algorithm, recipe: Recipe) -> SampleSpec:
    spec = algorithm.spec(0, 0, recipe.model)
    assert isinstance(spec, SampleSpec)
    return spec


def _networks(model: PipelineModel, recipe: Recipe) -> dict[str, int]:
    sizes = {"transformer": 0, "text encoders": 0, "decoder": 0}
    for name, part in model.pipe.components.items():
        if not isinstance(part, nn.Module):
            continue
        small = name in model.large and recipe.model.quantize is not None
        place = {"transformer": "transformer", "vae": "decoder"}.get(name, "text encoders")
        sizes[place] += nbytes(part, [part] if small else [])
    return sizes


def _folded(model: PipelineModel, algorithm: Algorithm, recipe: Recipe) -> int:
    """Bytes of the folded weights that `model.fold` keeps on a GPU: the adapted weights once more,
    and again for an old policy, which an update runs together with the current one. A recipe in
    float32 that does not set it counts as one for a CPU, where nothing is folded."""
    section = recipe.model
    possible = section.lora is not None and section.quantize is None
    there = model.dtype != torch.float32 or _spec(algorithm, recipe).slopes
    folds = section.fold if section.fold is not None else there
    if not possible or not folds:
        return 0
    names = {name.split(".lora_")[0] for name in model.policy.trained}
    layers = (model.transformer.get_submodule(name) for name in names)
    policies = 2 if "old" in algorithm.needs else 1
    return policies * sum(layer.base_layer.weight.nbytes for layer in layers)


def _stored(model: Any, spec: SampleSpec, samples: int) -> int:
    """Latents of the trained steps of a whole rollout, and gradients a sample, in float32."""
    c, h, w = model.latent_shape(spec.height, spec.width)
    steps = len(spec.trained)
    tensors = 1 + (steps + 1 if steps else 0) + (steps if spec.means else 0)
    tensors += steps if spec.apart and spec.guidance > 1 and model.guidance == "negative" else 0
    return samples * (tensors * c * h * w + spec.slopes * model.policy.size) * 4


def _update(model: Any, algorithm: Algorithm, recipe: Recipe) -> Callable[[], object]:
    micro = recipe.learner.micro_batch
    rollout = _rollout(model, _spec(algorithm, recipe), micro)
    terms = algorithm.terms(rollout, Prepared(torch.ones(micro)), torch.Generator())
    first = next(iter(terms.micro(recipe.learner)))
    return lambda: algorithm.loss(model, first).loss.sum().backward()


def _works(model: Any, algorithm: Algorithm, recipe: Recipe) -> dict[str, Callable[[], object]]:
    spec, batch = _spec(algorithm, recipe), recipe.sampler.batch
    trace = _rollout(model, spec, batch).paths
    context, sigma = trace.context, torch.ones(batch, device=model.device)

    def draw() -> object:
        cond = context.cond.rows(trace.row)
        negative = context.negative.rows(trace.row) if context.negative else None
        gradient: Gradient = "conditional" if spec.apart else "both"
        inputs = model, trace.clean, sigma, cond, negative, spec.guidance
        with torch.set_grad_enabled(spec.slopes):
            v = guided(*inputs, gradient=gradient)
        if spec.slopes:
            v.sum().backward()
        return v

    @torch.no_grad()
    def decode() -> object:
        return model.pixels(trace.clean)

    return {"drawing": draw, "decoding": decode}


def _rollout(model: Any, spec: SampleSpec, n: int) -> Rollout:
    """n samples as the sampler would leave them, without numbers."""
    shape, steps = model.latent_shape(spec.height, spec.width), len(spec.trained)

    def latents(count: int) -> Tensor:
        return torch.empty(n, count, *shape, device=model.device)

    cond = model.blank(1)
    two_branches = model.guidance == "negative" and spec.guidance > 1
    context = FlowContext(
        sigmas=model.sigmas(spec.steps, spec.height, spec.width).to(model.device),
        trained=spec.trained,
        cond=cond,
        negative=cond if two_branches else None,
    )
    trace = FlowTrace(
        context,
        row=torch.zeros(n, dtype=torch.long, device=model.device),
        latents=latents(steps + 1 if steps else 0),
        means=latents(steps if spec.means else 0),
        clean=latents(1)[:, 0],
        slopes=[model.policy.weights()] * n if spec.slopes else None,
    )
    logp = torch.empty(n, steps, device=model.device)
    nobody: Any = [None] * n
    return Rollout(nobody, torch.arange(n), trace, logp, version=0, scores=nobody, weights={})

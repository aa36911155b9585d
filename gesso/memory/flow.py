"""Memory of flow models: an update, a denoising step, VAE decoding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gesso.algorithms.base import Algorithm, Terms
from gesso.config import Recipe
from gesso.memory.meta import Load, nbytes, run, tensors_of
from gesso.models.flow.guidance import guided
from gesso.models.flow.loading import NETWORKS
from gesso.models.flow.pipeline import PipelineModel
from gesso.quiet import quiet
from gesso.ranks import ALONE
from gesso.rollout import Rollout
from gesso.traces.flow import FlowContext, FlowTrace
from gesso.types import Prompt, Sample, SampleSpec, Score


def load(model: PipelineModel, algorithm: Algorithm, recipe: Recipe) -> Load:
    networks = _networks(model, recipe)
    if model.runs_in_half:  # autocast keeps a second copy of the weights in half precision
        by_block = recipe.cluster.sharding is not None and recipe.model.gradient_checkpointing
        networks["weights in half precision"] = 0 if by_block else model.policy.size * 2
        with quiet("diffusers"):
            model.policy.module.to(model.dtype)
    samples = recipe.data.groups * algorithm.group
    works = _works(model, algorithm, recipe)
    terms = samples // algorithm.updates * algorithm.terms_a_sample
    return Load(
        networks,
        stored=_stored(model, _spec(algorithm, recipe), samples),
        tensors=tensors_of(p for p in model.pipe.components.values() if isinstance(p, nn.Module)),
        update=_update(model, algorithm, recipe),
        works=works,
        host={},
        micro_batches=-(-terms // recipe.learner.micro_batch),
        without_network=frozenset({"decoding", "encoding", "decoding in evaluations"}),
        of_samplers=frozenset(works),
    )


def _spec(algorithm: Algorithm, recipe: Recipe) -> SampleSpec:
    spec = algorithm.spec(0, 0, recipe.model)
    assert isinstance(spec, SampleSpec)
    return spec


def _networks(model: PipelineModel, recipe: Recipe) -> dict[str, int]:
    sizes = {"transformer": 0, "text encoders": 0, "VAE": 0}
    for name, part in model.pipe.components.items():
        if not isinstance(part, nn.Module):
            continue
        quantized = name in model.large and recipe.model.quantize is not None
        label = {**dict.fromkeys(NETWORKS, "transformer"), "vae": "VAE"}.get(name, "text encoders")
        sizes[label] += nbytes(part, [part] if quantized else [])
    return sizes


def _stored(model: Any, spec: SampleSpec, samples: int) -> int:
    """Latents of the trained steps of a whole rollout, and per-sample gradients, in float32."""
    elements = math.prod(model.latent_shape(*spec.size))
    steps = len(spec.trained)
    tensors = 1 + (steps + 1 if steps else 0) + (steps if spec.means else 0)
    two_branches = model.guidance == "negative" and spec.guidance > 1
    tensors += steps if two_branches and spec.guidance_gradient == "conditional" else 0
    return samples * (tensors * elements + spec.per_sample_grads * model.policy.size) * 4


def _update(model: Any, algorithm: Algorithm, recipe: Recipe) -> Callable[[], object]:
    micro = recipe.learner.micro_batch
    rollout = _rollout(model, _spec(algorithm, recipe), micro)

    @run
    @torch.no_grad()
    def first() -> Terms:
        prepared = algorithm.prepare(model, rollout, recipe.learner)
        terms = algorithm.terms(rollout, replace(prepared, advantages=torch.ones(micro)))
        return terms.rows(terms.micro_batches(recipe.learner)[0])

    def update() -> None:
        terms = algorithm.complete(model, first, recipe.learner, ALONE)
        with model.policy.folded():
            algorithm.loss(model, terms).loss.sum().backward()

    return update


def _works(model: Any, algorithm: Algorithm, recipe: Recipe) -> dict[str, Callable[[], object]]:
    """Those of evaluations only if their samples have another size."""
    spec, batch = _spec(algorithm, recipe), recipe.sampler.batch
    works = _sampling(model, spec, batch)
    evaluated = algorithm.eval_spec(recipe.eval, recipe.model, "current")
    assert isinstance(evaluated, SampleSpec)
    if evaluated.size != spec.size:
        rows = min(batch, recipe.eval.prompts * recipe.eval.samples)
        others = _sampling(model, evaluated, rows)
        works |= {f"{name} in evaluations": work for name, work in others.items()}

    @torch.no_grad()
    def encode() -> object:
        """Images, or the clips of a video model."""
        frames = [spec.frames] if spec.frames > 1 else []
        size = batch, 3, *frames, spec.height, spec.width
        return model.latents(torch.empty(size, dtype=model.pipe.vae.dtype, device=model.device))

    return works | ({"encoding": encode} if recipe.sampler.engine == "data" else {})


def _sampling(model: Any, spec: SampleSpec, batch: int) -> dict[str, Callable[[], object]]:
    trace = _rollout(model, spec, batch).flow_trace
    context, sigma = trace.context, torch.ones(batch, device=model.device)

    def denoise() -> object:
        cond = context.cond.rows(trace.row)
        negative = context.negative.rows(trace.row) if context.negative else None
        branches = model, trace.clean, sigma, cond, negative, spec.guidance
        with model.policy.folded(), torch.set_grad_enabled(spec.per_sample_grads):
            v = guided(*branches, gradient=spec.guidance_gradient).velocity
            if spec.per_sample_grads:
                v.sum().backward()
        return v

    @torch.no_grad()
    def decode() -> object:
        with model.policy.folded("current"):
            cond = context.cond.rows(trace.row)
            return model.pixels(model.completed(trace.clean, cond))

    return {"denoising": denoise, "decoding": decode}


def _rollout(model: Any, spec: SampleSpec, n: int) -> Rollout:
    """n samples as the sampler returns them, with shapes only."""
    shape, steps = model.latent_shape(*spec.size), len(spec.trained)

    def latents(count: int) -> Tensor:
        return torch.empty(n, count, *shape, device=model.device)

    cond = model.blank(1, spec.size)
    two_branches = model.guidance == "negative" and spec.guidance > 1
    stored = two_branches and spec.guidance_gradient == "conditional"
    context = FlowContext(
        sigmas=model.sigmas(spec.steps, *spec.size).to(model.device),
        cond=cond,
        negative=cond if two_branches else None,
        fine=torch.empty(3, device=model.device),
    )
    trace = FlowTrace(
        context,
        row=torch.zeros(n, dtype=torch.long, device=model.device),
        steps=torch.tensor(spec.trained, dtype=torch.long, device=model.device).repeat(n, 1),
        latents=latents(steps + 1 if steps else 0),
        means=latents(steps if spec.means else 0),
        clean=latents(1)[:, 0],
        per_sample_grads=[model.policy.tensors()] * n if spec.per_sample_grads else None,
        negatives=latents(steps) if stored and not spec.per_sample_grads else None,
    )
    logp = torch.empty(n, steps, device=model.device)
    samples = [Sample(Prompt(""), None, seed=i) for i in range(n)]
    scores, weights = [Score(0.0, {"any": 0.0})] * n, {"any": 0.0}  # a gate needs one of weight 0
    return Rollout(samples, torch.arange(n), trace, logp, version=0, scores=scores, weights=weights)

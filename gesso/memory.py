"""How much memory a recipe takes on its device, worked out without weights and without a device.

The networks are made on torch's meta device, which knows shapes and no numbers; one micro-batch of
the update, one batch of drawing and one of decoding are run there, and every tensor that comes and
goes is counted. What is left out: the allocator's rounding, the device's own context (some hundred
MB on CUDA), and rewards, which live in processes of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gesso import build
from gesso.algorithms.base import Algorithm, Prepared
from gesso.config import Model, Recipe
from gesso.models.flow.base import guided
from gesso.models.flow.pipeline import PipelineModel, quiet
from gesso.types import FlowContext, FlowTrace, Rollout, SampleSpec, UserError

NF4_BYTES = 0.5 + 4 / 64  # a weight: four bits, and a float32 scale for every 64 of them


@dataclass(frozen=True)
class Memory:
    """Bytes. `lasting` is there all the time; of `passing` one at a time."""

    lasting: dict[str, int]
    passing: dict[str, int]

    @property
    def peak(self) -> int:
        return sum(self.lasting.values()) + max(self.passing.values())


def estimate(recipe: Recipe) -> Memory:
    if not isinstance(recipe.model, Model):
        raise UserError("memory of models that write cannot be worked out yet")
    empty = recipe.model.model_copy(update={"device": "meta", "quantize": None})
    model = build.model(recipe.model_copy(update={"model": empty}))
    if not isinstance(model, PipelineModel):
        raise UserError(
            f'memory of model "{recipe.model.name}" cannot be worked out: only of '
            "diffusers pipelines that derive from PipelineModel"
        )
    algorithm = build.algorithm(recipe)
    policy = model.policy
    trained = sum(p.nbytes for p in policy.trained.values())
    networks = _networks(model, recipe)
    if model.runs_in_half:  # autocast keeps the weights a second time, in half precision
        networks["weights in half precision"] = policy.size * 2
        with quiet():
            policy.module.to(model.dtype)
    for copy in (*algorithm.needs, *(("ema",) if recipe.learner.ema else ())):
        policy.keep(copy)
    spec = _spec(algorithm, recipe)
    samples = recipe.data.groups * algorithm.group
    lasting = {
        **networks,
        "gradients": trained,
        "optimizer": 2 * trained,
        "copies of the trained weights": len(policy.copies) * trained,
        "stored samples": _stored(model, spec, samples),
    }
    for parameter in policy.trained.values():  # as they are from the second micro-batch on
        parameter.grad = torch.empty_like(parameter)
    works = _passes(model, algorithm, recipe)
    passing = {name: _peak(model, work) for name, work in works.items()}
    return Memory({name: size for name, size in lasting.items() if size}, passing)


def _spec(algorithm: Algorithm, recipe: Recipe) -> SampleSpec:
    spec = algorithm.spec(0, 0, recipe.model)
    assert isinstance(spec, SampleSpec)
    return spec


def _networks(model: Any, recipe: Recipe) -> dict[str, int]:
    """Bytes by part; what a recipe quantizes counts as if it were."""
    found = {"transformer": 0, "text encoders": 0, "decoder": 0}
    for name, part in model.pipe.components.items():
        if not isinstance(part, nn.Module):
            continue
        small = name in model.large and recipe.model.quantize is not None
        place = {"transformer": "transformer", "vae": "decoder"}.get(name, "text encoders")
        found[place] += _bytes(part, small)
    return found


def _bytes(part: nn.Module, quantized: bool) -> int:
    total = sum(t.nbytes for t in (*part.parameters(), *part.buffers()))
    if quantized:
        frozen = [
            layer.weight
            for layer in part.modules()
            if isinstance(layer, nn.Linear) and not layer.weight.requires_grad
        ]
        total -= sum(int(w.nbytes - w.numel() * NF4_BYTES) for w in frozen)
    return total


def _stored(model: Any, spec: SampleSpec, samples: int) -> int:
    """Latents of the trained steps of a whole rollout, in float32."""
    c, h, w = model.latent_shape(spec.height, spec.width)
    steps = len(spec.trained)
    tensors = 1 + (steps + 1 if steps else 0) + (steps if spec.means else 0)
    return samples * tensors * c * h * w * 4


def _passes(model: Any, algorithm: Algorithm, recipe: Recipe) -> dict[str, Callable[[], object]]:
    """The three things a run does with its networks, each once, as large as in the run."""
    spec = _spec(algorithm, recipe)
    micro, batch = recipe.learner.micro_batch, recipe.sampler.batch
    rollout = _rollout(model, spec, micro)
    terms = algorithm.terms(rollout, Prepared(torch.ones(micro)), torch.Generator())
    terms = terms.rows(slice(0, micro))
    trace = _rollout(model, spec, batch).paths
    context, sigma = trace.context, torch.ones(batch, device=model.device)

    @torch.no_grad()
    def draw() -> object:
        cond = context.cond.rows(trace.row)
        negative = context.negative.rows(trace.row) if context.negative else None
        return guided(model, trace.clean, sigma, cond, negative, spec.guidance)

    @torch.no_grad()
    def decode() -> object:
        return model.pixels(trace.clean)

    return {
        "update": lambda: algorithm.loss(model, terms).loss.sum().backward(),
        "drawing": draw,
        "decoding": decode,
    }


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
    )
    logp = torch.empty(n, steps, device=model.device)
    nobody: Any = [None] * n
    return Rollout(nobody, torch.arange(n), trace, logp, version=0, scores=nobody, weights={})


def _peak(model: Any, work: Callable[[], object]) -> int:
    """Most bytes that live at once of what `work` makes; the weights are there already."""
    networks = [part for part in model.pipe.components.values() if isinstance(part, nn.Module)]
    weights = [t for part in networks for t in (*part.parameters(), *part.buffers())]
    weights += [t for copy in model.policy.copies.values() for t in copy.values()]
    weights += [p.grad for p in model.policy.trained.values()]
    known = {t.untyped_storage()._cdata for t in weights}
    # On the meta device torch would write down every attention matrix; devices do not.
    with (
        patch.object(nn.functional, "scaled_dot_product_attention", _attention),
        _Live(known) as live,
    ):
        work()
    return live.peak


class _Live(TorchDispatchMode):
    """Counts every storage from the operation that makes it to its end."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known = known

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _Attention.apply(query, key, value)


class _Attention(torch.autograd.Function):
    """Shapes of a fused attention: it keeps its inputs and its output for the backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors[:3])

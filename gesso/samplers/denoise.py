"""The one denoising loop, for every flow model.

Each sample's noise comes from its own seed, so a picture does not depend on how the batch is cut,
on the device that draws it or on what else is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gesso.formulas import flow_steps
from gesso.models.flow.base import FlowModel, PromptCache, guided
from gesso.types import (
    Conditioning,
    FlowContext,
    FlowTrace,
    Prompt,
    Sample,
    SampleSpec,
    Weights,
    seed_of,
)


@dataclass(frozen=True)
class Piece:
    """Samples that are finished; pieces arrive while the rest is still being drawn."""

    samples: list[Sample]
    trace: FlowTrace
    logp: Tensor  # (n, S)


class DenoisingSampler:
    def __init__(self, model: FlowModel, batch: int) -> None:
        self.model = model
        self.batch = batch
        self.embeddings = PromptCache(model)
        self.version = 0

    def load(self, weights: Weights, version: int) -> None:
        """Take new weights. Shared with the learner's module, they are there already."""
        self.model.policy.load(weights)
        self.version = version

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Prompt], row: Sequence[int], seeds: Sequence[int], spec: SampleSpec
    ) -> Iterator[Piece]:
        """One sample of prompts[row[i]] from seeds[i] for every i, in pieces of `batch`."""
        cond, negative = self.embeddings.conditions(prompts, spec.guidance)
        sigmas = self.model.sigmas(spec.steps, spec.height, spec.width).to(self.model.device)
        context = FlowContext(sigmas, spec.trained, cond, negative)
        first = {r: seed for r, seed in reversed(list(zip(row, seeds, strict=True)))}
        for start in range(0, len(seeds), self.batch):
            part = slice(start, start + self.batch)
            trace, logp = _denoise(self.model, context, row[part], seeds[part], first, spec)
            images = self.model.decode(trace.clean).numpy()
            samples = [
                Sample(prompts[r], image, seed)
                for r, image, seed in zip(row[part], images, seeds[part], strict=True)
            ]
            yield Piece(samples, trace, logp)


@dataclass(frozen=True)
class _State:
    """Where the paths of some samples are: latents, what they are conditioned on, and the guess of
    the picture that a multistep solver remembers."""

    x: Tensor  # (n, C, H, W)
    cond: Conditioning
    negative: Conditioning | None
    before: flow_steps.Clean | None = None

    def rows(self, index: Tensor) -> _State:
        b = self.before
        return _State(
            self.x[index],
            self.cond.rows(index),
            self.negative.rows(index) if self.negative else None,
            flow_steps.Clean(b.x[index], b.sigma[index]) if b else None,
        )


def _denoise(
    model: FlowModel,
    context: FlowContext,
    row: Sequence[int],
    seeds: Sequence[int],
    first: Mapping[int, int],
    spec: SampleSpec,
) -> tuple[FlowTrace, Tensor]:
    """`first`: the seed of each group's first sample, from which the whole group's common noise is
    drawn when the spec asks for it."""
    noise = _Noise(seeds, model.latent_shape(spec.height, spec.width), model.device)
    rows = torch.tensor(row, device=model.device)
    if spec.same_noise:
        leads, branch = rows.unique(return_inverse=True)
        start = _Noise(
            [seed_of(first[r], "group") for r in leads.tolist()], noise.shape, noise.device
        )
        state = _start(context, leads, start.draw())
    else:
        branch = None
        state = _start(context, rows, noise.draw())
    latents: list[Tensor] = []
    means: list[Tensor] = []
    logps: list[Tensor] = []
    for i in range(spec.steps):
        if branch is not None and i == spec.stochastic.start:
            state = state.rows(branch)  # here the paths of a group part
        if i in spec.trained and not latents:
            latents.append(state.x)
        sigma, sigma_next = context.sigmas[i : i + 2, None].expand(2, len(state.x))
        v = guided(model, state.x, sigma, state.cond, state.negative, spec.guidance, spec.weights)
        if i in spec.stochastic:
            step = flow_steps.transition(
                spec.rule, state.x, v, sigma, sigma_next, context.sigmas[1], spec.noise
            )
            state = replace(state, x=step.draw(noise.draw()), before=None)
            if i in spec.trained:
                logps.append(step.logp(state.x))
                latents.append(state.x)
                means += [step.mean] if spec.means else []
        elif spec.solver == "dpm2":
            x, clean = flow_steps.dpm2(state.x, v, sigma, sigma_next, state.before)
            state = replace(state, x=x, before=clean)
        else:
            state = replace(state, x=flow_steps.euler(state.x, v, sigma, sigma_next))
    assert len(logps) == len(spec.trained), "only stochastic steps can be trained"
    x = state.x
    trace = FlowTrace(context, rows, latents=_steps(latents, x), means=_steps(means, x), clean=x)
    return trace, torch.stack(logps, 1) if logps else x.new_empty(len(x), 0)


def _start(context: FlowContext, rows: Tensor, x: Tensor) -> _State:
    negative = context.negative.rows(rows) if context.negative else None
    return _State(x, context.cond.rows(rows), negative)


def _steps(kept: Sequence[Tensor], like: Tensor) -> Tensor:
    """(N, S, C, H, W), where S may be 0."""
    return torch.stack(kept, 1) if kept else like.new_empty(len(like), 0, *like.shape[1:])


class _Noise:
    """Standard normal noise, one stream a sample, drawn on the CPU whatever the device."""

    def __init__(
        self, seeds: Sequence[int], shape: tuple[int, int, int], device: torch.device
    ) -> None:
        self.streams = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.shape = shape
        self.device = device

    def draw(self) -> Tensor:
        rows = [torch.randn(self.shape, generator=stream) for stream in self.streams]
        return torch.stack(rows).to(self.device)

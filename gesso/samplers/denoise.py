"""The one denoising loop, for every flow model.

Each sample's noise comes from its own seed, so a picture does not depend on how the batch is cut,
on the device that draws it or on what else is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gesso.formulas import flow_steps
from gesso.models.flow.base import FlowModel, PromptCache, guided
from gesso.types import FlowContext, FlowTrace, Prompt, Sample, SampleSpec, Weights


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
        context = FlowContext(
            sigmas=self.model.sigmas(spec.steps).to(self.model.device),
            trained=spec.trained,
            cond=self.embeddings([p.text for p in prompts]),
            negative=self.embeddings([p.negative for p in prompts]) if spec.guidance != 1 else None,
        )
        for start in range(0, len(seeds), self.batch):
            part = slice(start, start + self.batch)
            trace, logp = _denoise(self.model, context, row[part], seeds[part], spec)
            images = self.model.decode(trace.clean).numpy()
            samples = [
                Sample(prompts[r], image, seed)
                for r, image, seed in zip(row[part], images, seeds[part], strict=True)
            ]
            yield Piece(samples, trace, logp)


def _denoise(
    model: FlowModel,
    context: FlowContext,
    row: Sequence[int],
    seeds: Sequence[int],
    spec: SampleSpec,
) -> tuple[FlowTrace, Tensor]:
    noise = _Noise(seeds, model.latent_shape(spec.height, spec.width), model.device)
    rows = torch.tensor(row, device=model.device)
    cond = context.cond.rows(rows)
    negative = context.negative.rows(rows) if context.negative else None
    sigmas = context.sigmas
    x = noise.draw()
    latents = [x] if spec.trained.start == 0 and spec.trained else []
    logps: list[Tensor] = []
    for i in range(spec.steps):
        sigma, sigma_next = sigmas[i].expand(len(seeds)), sigmas[i + 1].expand(len(seeds))
        v = guided(model, x, sigma, cond, negative, spec.guidance, spec.weights)
        if i in spec.stochastic:
            step = flow_steps.transition(spec.rule, x, v, sigma, sigma_next, sigmas[1], spec.noise)
            x = step.draw(noise.draw())
        else:
            x = flow_steps.euler(x, v, sigma, sigma_next)
        if i in spec.trained:
            logps.append(step.logp(x))
        if i in spec.trained or i + 1 in spec.trained:
            latents.append(x)
    trace = FlowTrace(
        context,
        rows,
        latents=torch.stack(latents, 1) if latents else x.new_empty(len(x), 0, *x.shape[1:]),
        clean=x,
    )
    return trace, torch.stack(logps, 1) if logps else x.new_empty(len(x), 0)


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

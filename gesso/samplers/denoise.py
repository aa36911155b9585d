"""The one denoising loop, for every flow model.

Each sample's noise comes from its own seed, so a picture does not depend on how the batch is cut,
on the device that draws it or on what else is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gesso.formulas import diversity, flow_steps
from gesso.models.flow.base import FlowModel, PromptCache, guided
from gesso.rollout import (
    Conditioning,
    FlowContext,
    FlowTrace,
    Rollout,
)
from gesso.samplers.base import Piece
from gesso.types import Prompt, Sample, SampleSpec, Weights, seed_of
from gesso.weights.publish import HeldWeights, Publication


class DenoisingSampler:
    def __init__(self, model: FlowModel, batch: int) -> None:
        self.model = model
        self.batch = batch
        self.embeddings = PromptCache(model)
        self.weights = HeldWeights(model.policy)

    def accept(self, publication: Publication) -> None:
        self.weights.accept(publication)

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Prompt], row: Sequence[int], seeds: Sequence[int], spec: SampleSpec
    ) -> Iterator[Piece[FlowTrace]]:
        """One sample of prompts[row[i]] from seeds[i] for every i, in pieces of `batch`."""
        with self.model.policy.folded(soon=spec.weights):
            yield from self._pieces(prompts, row, seeds, spec)

    def _pieces(
        self, prompts: Sequence[Prompt], row: Sequence[int], seeds: Sequence[int], spec: SampleSpec
    ) -> Iterator[Piece[FlowTrace]]:
        cond, negative = self.embeddings.conditions(prompts, spec.guidance)
        sigmas = self.model.sigmas(spec.steps, spec.height, spec.width).to(self.model.device)
        context = FlowContext(sigmas, spec.trained, cond, negative)
        starts = self._shared_starts(context, row, seeds, spec) if spec.same_noise else None
        for start in range(0, len(seeds), self.batch):
            part = slice(start, start + self.batch)
            trace, logp = self._draw(context, row[part], seeds[part], spec, starts)
            images = self.model.decode(trace.clean).numpy()
            samples = [
                Sample(prompts[r], image, seed)
                for r, image, seed in zip(row[part], images, seeds[part], strict=True)
            ]
            yield Piece(list(range(len(seeds))[part]), samples, trace, logp)

    def describe(self, rollout: Rollout) -> dict[str, float]:
        return {"diversity": diversity.within_groups(rollout.paths.clean, rollout.group)}

    def close(self) -> None:
        """It holds nothing beside the model."""

    def _shared_starts(
        self, context: FlowContext, row: Sequence[int], seeds: Sequence[int], spec: SampleSpec
    ) -> dict[int, Tensor]:
        """Group → where its paths part: its common noise after the ODE steps before the first
        stochastic one, run once a group however the batch is cut later."""
        first = {r: seed for r, seed in reversed(list(zip(row, seeds, strict=True)))}
        groups = list(first)
        starts: dict[int, Tensor] = {}
        for at in range(0, len(groups), self.batch):
            part = groups[at : at + self.batch]
            noise = self._noise([seed_of(first[r], "group") for r in part], spec)
            steps = range(spec.stochastic.start)
            path = _walk(self.model, context, self._rows(part), noise.draw(), steps, spec, noise)
            starts |= dict(zip(part, path.x, strict=True))
        return starts

    def _draw(
        self,
        context: FlowContext,
        row: Sequence[int],
        seeds: Sequence[int],
        spec: SampleSpec,
        starts: Mapping[int, Tensor] | None,
    ) -> tuple[FlowTrace, Tensor]:
        noise = self._noise(seeds, spec)
        if starts is None:
            x, steps = noise.draw(), range(spec.steps)
        else:
            x = torch.stack([starts[r] for r in row])
            steps = range(spec.stochastic.start, spec.steps)
        rows = self._rows(row)
        path = _walk(self.model, context, rows, x, steps, spec, noise)
        x = path.x
        latents, means = _steps(path.latents, x), _steps(path.means, x)
        negatives = _steps(path.negatives, x) if path.negatives else None
        slopes = path.slopes if spec.slopes else None
        trace = FlowTrace(context, rows, latents, means, x, negatives, slopes)
        return trace, torch.stack(path.logps, 1) if path.logps else x.new_empty(len(x), 0)

    def _noise(self, seeds: Sequence[int], spec: SampleSpec) -> _Noise:
        shape = self.model.latent_shape(spec.height, spec.width)
        return _Noise(seeds, shape, self.model.device)

    def _rows(self, row: Sequence[int]) -> Tensor:
        return torch.tensor(row, device=self.model.device)


@dataclass
class _Path:
    """Where some samples are, and what is kept of the way: of the trained steps only."""

    x: Tensor  # (n, C, H, W)
    latents: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    negatives: list[Tensor] = field(default_factory=list)
    logps: list[Tensor] = field(default_factory=list)
    slopes: list[Weights] = field(default_factory=list)

    def keep(self, step: flow_steps.Transition, spec: SampleSpec) -> None:
        """Of a trained step that has led to x."""
        logp = step.logp(self.x)
        if spec.slopes:
            logp.sum().backward()
        self.logps.append(logp.detach())
        self.latents.append(self.x)
        self.means += [step.mean.detach()] if spec.means else []


def _walk(
    model: FlowModel,
    context: FlowContext,
    rows: Tensor,
    x: Tensor,
    steps: range,
    spec: SampleSpec,
    noise: _Noise,
) -> _Path:
    """Those steps of the schedule, from x on."""
    cond = context.cond.rows(rows)
    negative = context.negative.rows(rows) if context.negative else None
    path = _Path(x)
    before: flow_steps.Clean | None = None  # what a multistep solver remembers
    with _sloping(model, path, spec, 2 if negative is not None and not spec.apart else 1):
        for i in steps:
            trained = i in spec.trained
            if trained and not path.latents:
                path.latents.append(path.x)
            sigma, sigma_next = context.sigmas[i : i + 2, None].expand(2, len(x))
            with torch.set_grad_enabled(spec.slopes and trained):
                v, u = _velocities(model, path.x, sigma, cond, negative, spec)
                path.negatives += [u] if trained and u is not None else []
                if i in spec.stochastic:
                    step = flow_steps.transition(
                        spec.rule, path.x, v, sigma, sigma_next, context.sigmas[1], spec.noise
                    )
                    path.x, before = step.draw(noise.draw()).detach(), None
                    if trained:
                        path.keep(step, spec)
                elif spec.solver == "dpm2":
                    path.x, before = flow_steps.dpm2(path.x, v, sigma, sigma_next, before)
                else:
                    path.x = flow_steps.euler(path.x, v, sigma, sigma_next)
    return path


def _velocities(
    model: FlowModel,
    x: Tensor,
    sigma: Tensor,
    cond: Conditioning,
    negative: Conditioning | None,
    spec: SampleSpec,
) -> tuple[Tensor, Tensor | None]:
    """The guided one, and the negative branch's where that runs apart: never differentiated."""
    if negative is None or not spec.apart:
        return guided(model, x, sigma, cond, negative, spec.guidance, spec.weights), None
    with torch.no_grad():
        u = model.velocity(x, sigma, negative, spec.weights)
    return model.guide(u, model.velocity(x, sigma, cond, spec.weights), spec.guidance), u


@contextmanager
def _sloping(model: FlowModel, path: _Path, spec: SampleSpec, branches: int) -> Iterator[None]:
    """Within, every sample of a pass gathers a gradient of its own, over its row in each branch;
    afterwards they are in `path.slopes`. Every pass runs so, whether it is differentiated or not: a
    compiled network has one graph for all."""
    if not spec.slopes:
        yield
        return
    samples = len(path.x)
    rows = model.filled(branches * samples)
    together = rows % branches == 0  # a sample's rows gather in one place
    with model.policy.per_sample_grads(rows // branches if together else rows) as own:
        yield
    slopes = {}
    for name, weights in own.items():
        grad = weights.grad
        if grad is None:  # the network made nothing of it, or no step is trained
            continue
        if not together:
            grad = grad[: branches * samples].unflatten(0, (samples, branches)).sum(1)
        slopes[name] = grad.unbind()  # of rows that only fill, too
    path.slopes = [{name: t[i] for name, t in slopes.items()} for i in range(samples)]


def _steps(kept: Sequence[Tensor], like: Tensor) -> Tensor:
    """(N, S, C, H, W), where S may be 0."""
    return torch.stack(list(kept), 1) if kept else like.new_empty(len(like), 0, *like.shape[1:])


class _Noise:
    """Standard normal noise, one stream a sample, drawn on the CPU whatever the device."""

    def __init__(
        self, seeds: Sequence[int], shape: tuple[int, int, int], device: torch.device
    ) -> None:
        self.streams = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.shape = shape
        self.device = device

    def draw(self) -> Tensor:
        pinned = self.device.type == "cuda"  # else the copy would wait
        rows = torch.empty(len(self.streams), *self.shape, pin_memory=pinned)
        for row, stream in zip(rows, self.streams, strict=True):
            row.normal_(generator=stream)
        return rows.to(self.device, non_blocking=pinned)

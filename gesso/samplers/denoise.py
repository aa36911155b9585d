"""The denoising loop of all flow models.

Each sample's noise comes from the seed of that sample, so an image does not depend on how the batch
is split, on the device or on the other samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gesso.devices import to_device
from gesso.formulas import diversity, flow_steps
from gesso.models.flow.base import FlowModel, PromptCache
from gesso.models.flow.guidance import guided, rows_per_sample
from gesso.rollout import Rollout
from gesso.samplers.base import Piece, parts
from gesso.samplers.one_pass import OnePassRecorder
from gesso.samplers.recording import Recorded, StepRecorder, TrainedStep, TrajectoryRecorder
from gesso.timeline.recorder import phase
from gesso.traces.flow import Conditioning, FlowContext, FlowTrace
from gesso.types import OnePass, Prompt, Sample, SampleSpec, Size, Which, seed_of
from gesso.weights.publish import HeldWeights, Publication

FINE_STEPS = 1000


class DenoisingSampler:
    def __init__(self, model: FlowModel, batch: int) -> None:
        self.model = model
        self.batch = batch
        self.embeddings = PromptCache(model)
        self.weights = HeldWeights(model.policy)

    def accept(self, publication: Publication) -> None:
        self.weights.accept(publication)

    def prepare(self, which: Which) -> None:
        """Sharded weights are gathered in every pass."""

    def rest(self) -> None:
        """Nothing to free."""

    @torch.no_grad()
    def shared(self, prompts: Sequence[Prompt], spec: SampleSpec) -> FlowContext:
        cond, negative = self.embeddings.conditions(
            prompts, spec.size, spec.guidance, spec.negatives
        )
        sized = self.sized(spec, prompts[0])
        return FlowContext(self._sigmas(sized), cond, negative, self._sigmas(sized, FINE_STEPS))

    def sized(self, spec: SampleSpec, prompt: Prompt) -> SampleSpec:
        """The spec with the sample size of this prompt."""
        height, width = self.model.output_size(prompt, spec.height, spec.width)
        return replace(spec, height=height, width=width)

    def _sigmas(self, spec: SampleSpec, steps: int | None = None) -> Tensor:
        return self.model.sigmas(steps or spec.steps, *spec.size).to(self.model.device)

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Prompt],
        row: Sequence[int],
        seeds: Sequence[int],
        spec: SampleSpec,
        shared: FlowContext | None = None,
        only: range | None = None,
    ) -> Iterator[Piece[FlowTrace]]:
        """One sample of prompts[row[i]] from seeds[i] for every i, in pieces of `batch`. In an
        evaluation they may differ in size and schedule; those of a training batch share both."""
        first = shared or self.shared(prompts, spec)
        sizes = [self.sized(spec, prompt) for prompt in prompts]
        of_group = {r: seed for r, seed in reversed(list(zip(row, seeds, strict=True)))}
        with self.model.policy.folded(soon=spec.weights):
            for index in [only] if only else parts(row, self.batch, spec, prompts):
                rows, own = [row[i] for i in index], [seeds[i] for i in index]
                placed = sizes[rows[0]].placed(of_group[rows[0]])
                context = first
                if sizes[rows[0]] != sizes[0]:
                    context = replace(first, sigmas=self._sigmas(placed), fine=None)
                starts = self._starts(context, rows, of_group, placed) if spec.same_noise else None
                trace, logp = self._sample(context, rows, own, placed, starts)
                cond = context.cond.rows(trace.row)
                images = self._decoded(trace.clean, cond)
                fps = spec.fps if images.ndim == 5 else None  # (n, frames, height, width, 3)
                samples = [
                    Sample(prompts[r], image, seed, fps=fps)
                    for r, image, seed in zip(rows, images, own, strict=True)
                ]
                yield Piece(list(index), samples, trace, logp)

    def _decoded(self, latents: Tensor, cond: Conditioning) -> NDArray[np.uint8]:
        if self.model.device.type == "cuda":  # otherwise denoising would be timed as decoding
            torch.cuda.synchronize(self.model.device)
        with phase("decode"):
            return self.model.decode(latents, cond).numpy()

    def describe(self, rollout: Rollout) -> dict[str, float]:
        return {"diversity": diversity.within_groups(rollout.flow_trace.clean, rollout.group)}

    def close(self) -> None:
        """Nothing to release."""

    def _starts(
        self, context: FlowContext, row: Sequence[int], seeds: Mapping[int, int], spec: SampleSpec
    ) -> dict[int, Tensor]:
        """Group → the latent at which its samples diverge: the group's noise after the ODE steps
        before the first stochastic one. These run once for all samples of a group in a piece."""
        groups = list(dict.fromkeys(row))
        noise = self._noise([seed_of(seeds[r], "group") for r in groups], spec)
        steps = range(spec.stochastic.start)
        rows, x = self._rows(groups), noise.draw()
        denoised = _denoise(self.model, context, rows, x, steps, spec, noise)
        return dict(zip(groups, denoised.x, strict=True))

    def _sample(
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
        denoised = _denoise(self.model, context, rows, x, steps, spec, noise)
        x, recorded = denoised.x, denoised.recorded
        return recorded.trace(context, rows, spec.trained, x), recorded.logp(x)

    def _noise(self, seeds: Sequence[int], spec: SampleSpec) -> _Noise:
        return _Noise(self.model, seeds, spec.size)

    def _rows(self, row: Sequence[int]) -> Tensor:
        return torch.tensor(row, device=self.model.device)


@dataclass(frozen=True)
class _Denoised:
    """The final latents of some samples, and their recorded steps."""

    x: Tensor  # (n, C, H, W)
    recorded: Recorded


def _denoise(
    model: FlowModel,
    context: FlowContext,
    rows: Tensor,
    x: Tensor,
    steps: range,
    spec: SampleSpec,
    noise: _Noise,
) -> _Denoised:
    """Runs these steps of the schedule, starting at x."""
    cond = context.cond.rows(rows)
    negative = context.negative.rows(rows) if context.negative and spec.guidance > 1 else None
    recorder = _recorder(model, negative, spec)
    before: flow_steps.Clean | None = None  # previous prediction, for multistep solvers
    with recorder.recording(len(x)):
        for i in steps:
            trained = i in spec.trained
            sigma, sigma_next = context.sigmas[i : i + 2, None].expand(2, len(x))
            with recorder.trained_step() if trained else nullcontext():
                v = guided(
                    model,
                    x,
                    sigma,
                    cond,
                    negative,
                    spec.guidance,
                    spec.weights,
                    spec.guidance_gradient,
                )
                if i in spec.stochastic:
                    step = flow_steps.transition(
                        spec.rule, x, v.velocity, sigma, sigma_next, context.sigmas[1], spec.noise
                    )
                    x_next, before = step.draw(noise.draw()).detach(), None
                    if trained:
                        logp = step.logp(x_next)
                        recorder.record(TrainedStep(x, x_next, step.mean, logp, v.negative))
                    x = x_next
                elif spec.solver == "dpm2":
                    x, before = flow_steps.dpm2(x, v.velocity, sigma, sigma_next, before)
                else:
                    x = flow_steps.euler(x, v.velocity, sigma, sigma_next)
    return _Denoised(x, recorder.recorded)


def _recorder(model: FlowModel, negative: Conditioning | None, spec: SampleSpec) -> StepRecorder:
    if isinstance(spec.record, OnePass):
        return OnePassRecorder(model, rows_per_sample(negative, spec.guidance_gradient))
    return TrajectoryRecorder(spec.record.means)


class _Noise:
    """Standard normal noise, one stream per sample, always drawn on the CPU."""

    def __init__(self, model: FlowModel, seeds: Sequence[int], size: Size) -> None:
        self.streams = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.model = model
        self.size = size

    def draw(self) -> Tensor:
        rows = torch.stack([self.model.noise(self.size, stream) for stream in self.streams])
        return to_device(rows, self.model.device)

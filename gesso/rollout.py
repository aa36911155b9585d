"""A rollout: samples, how they were generated, and their scores.

Shape legend, used throughout the project:
    N samples · P prompts · S trained steps · C,H,W latent channels, height, width · L,D text
Latents of videos have another axis, the frames: (N, C, F, H, W).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gesso.traces.flow import FlowTrace
from gesso.traces.pieces import widened
from gesso.traces.tokens import TokenTrace
from gesso.types import Sample, Score

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Rollout:
    """N samples with their traces, log-probs and scores. The record is the same for both families:
    S counts denoising steps for a flow model and tokens for a language model."""

    samples: Sequence[Sample]  # N
    group: Tensor  # (N,): id of the prompt's group, assigned at sampling
    trace: FlowTrace | TokenTrace
    logp: Tensor  # (N, S); of responses on the CPU
    version: int  # of the weights that generated it
    scores: Sequence[Score]  # N
    weights: Mapping[str, float]  # of the rewards, by name
    greedy: Tensor | None = None  # (N,) float64: reward of the greedy response to the same prompt

    def rows(self, index: Tensor) -> Rollout:
        selected = index.tolist()
        return Rollout(
            [self.samples[i] for i in selected],
            self.group[index],
            self.trace.rows(index),
            self.logp[index],
            self.version,
            [self.scores[i] for i in selected],
            self.weights,
            None if self.greedy is None else self.greedy[index],
        )

    def aged(self) -> Rollout:
        """A copy without what is only valid for the weights that generated it."""
        if not isinstance(self.trace, FlowTrace):
            return self
        return replace(self, trace=replace(self.trace, negatives=None, per_sample_grads=None))

    @staticmethod
    def join(one: Rollout, other: Rollout) -> Rollout:
        """Joins the responses of two sampling calls, whose groups are disjoint."""
        import torch

        first = int(one.group.max()) + 1 if len(one.group) else 0
        return Rollout(
            [*one.samples, *other.samples],
            torch.cat([one.group, other.group + first]),
            type(one.trace).concat([one.trace, other.trace]),  # type: ignore[list-item]
            widened([one.logp, other.logp]),
            min(one.version, other.version),
            [*one.scores, *other.scores],
            one.weights,
        )

    @staticmethod
    def merge(one: Rollout, other: Rollout) -> Rollout:
        """Joins two parts of the same groups; the samples of a group become adjacent."""
        import torch

        joined = replace(Rollout.join(one, other), group=torch.cat([one.group, other.group]))
        return joined.rows(joined.group.argsort(stable=True))

    @property
    def flow_trace(self) -> FlowTrace:
        """The trace of a flow model."""
        assert isinstance(self.trace, FlowTrace)
        return self.trace

    @property
    def token_trace(self) -> TokenTrace:
        """The trace of a language model."""
        assert isinstance(self.trace, TokenTrace)
        return self.trace

    @property
    def mask(self) -> Tensor:
        """(N, S) bool: True on the tokens of the responses."""
        return self.token_trace.mask

    @property
    def scored(self) -> Tensor:
        """Indices of the samples that have a score."""
        import torch

        good = [i for i, score in enumerate(self.scores) if score.ok]
        return torch.tensor(good, dtype=torch.long)

    @property
    def rewards(self) -> Tensor:
        """(N,) float64. Only for rollouts in which every sample has a score."""
        import torch

        return torch.tensor([score.value for score in self.scores], dtype=torch.float64)

    @property
    def components(self) -> Tensor:
        """(N, R) float64: each reward separately, unweighted, in the order of `weights`. NaN where
        a reward does not apply."""
        import torch

        rows = [[s.parts.get(name, math.nan) for name in self.weights] for s in self.scores]
        return torch.tensor(rows, dtype=torch.float64)

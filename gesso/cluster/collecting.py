"""Sampling and scoring at the same time.

Every finished piece is passed to the rewards immediately, so that scoring overlaps with sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gesso import clock
from gesso.rewards.transport.service import RewardService, Scoring
from gesso.rollout import Rollout
from gesso.samplers.base import Piece
from gesso.samplers.partial import Begun
from gesso.timeline import recorder
from gesso.traces.pieces import widened
from gesso.track.progress import Progress
from gesso.types import Prompt, ResponseSpec, Sample, SampleSpec, Score


@dataclass(frozen=True)
class Request:
    """One sample of prompts[row[i]] from seeds[i] for every i."""

    prompts: Sequence[Prompt]
    row: Sequence[int]
    seeds: Sequence[int]
    spec: SampleSpec | ResponseSpec
    label: str  # for progress: "batch 3", "the evaluation"
    step: int | None = None  # of training; None: an evaluation, scored with its rewards
    batch: int | None = None  # samples of a worker at a time; None: as in the recipe
    keep: Callable[[int, Sample], Sample] = lambda i, sample: sample  # of sample i, once scored
    begun: Begun | None = None  # responses to continue

    @property
    def trained(self) -> bool:
        """Whether its traces are trained on: not those of an evaluation or an unfinished
        response."""
        return self.step is not None and (self.begun is None or not self.begun.limit)

    def part(self, rows: Sequence[int], places: range) -> Request:
        """Of these prompts, the samples at these places of their groups, which are adjacent."""
        group = self.row.count(self.row[0])
        chosen = [row * group + place for row in rows for place in places]
        return replace(
            self,
            row=[self.row[i] for i in chosen],
            seeds=[self.seeds[i] for i in chosen],
        )


@dataclass(frozen=True)
class Timing:
    """Seconds of one batch: sampling, scoring, their overlap, and waiting for the last scores."""

    sample: float
    score: float
    overlap: float
    wait: float

    def __add__(self, other: Timing) -> Timing:
        return Timing(
            self.sample + other.sample,
            self.score + other.score,
            self.overlap + other.overlap,
            self.wait + other.wait,
        )


@dataclass(frozen=True)
class PendingSamples:
    """Finished samples that are still being scored."""

    request: Request
    pieces: Sequence[Piece]
    scoring: Scoring
    version: int
    weights: Mapping[str, float]  # of the rewards
    started: float
    ended: float
    progress: Progress

    def result(self) -> tuple[Rollout, Timing]:
        """Waits for the last score."""
        waiting = clock.seconds()
        self.progress.phase(f"scoring {self.request.label}", self.scoring.pending)
        with recorder.phase("wait"):
            scored = self.scoring.result(self.progress.advance)
        done = clock.seconds()
        first, last = scored.started, scored.ended
        timing = Timing(
            sample=self.ended - self.started,
            score=last - first,
            overlap=max(0.0, min(self.ended, last) - first),
            wait=done - waiting,
        )
        index = torch.tensor([i for piece in self.pieces for i in piece.index])
        rollout = Rollout(
            samples=[sample for piece in self.pieces for sample in piece.samples],
            group=torch.tensor(self.request.row)[index],
            trace=type(self.pieces[0].trace).concat([piece.trace for piece in self.pieces]),
            logp=widened([piece.logp for piece in self.pieces]),
            version=self.version,
            scores=[scored.scores[i] for i in index.tolist()],
            weights=self.weights,
        )
        if index.diff().lt(0).any():  # pieces finished in another order than requested
            rollout = rollout.rows(index.argsort())
        return rollout, timing


@dataclass(frozen=True)
class PendingStep:
    """The samples of one step and, for algorithms with a greedy baseline, the greedy sample of each
    group."""

    samples: PendingSamples
    greedy: PendingSamples | None
    drawn: Mapping[str, float]  # metrics of how its prompts were drawn

    def result(self) -> tuple[Rollout, Timing]:
        rollout, timing = self.samples.result()
        if self.greedy is not None:
            rollout = _with_baseline(rollout, self.greedy.result()[0])
        return rollout, timing


def sample(
    request: Request,
    generated: Iterable[Piece],
    version: int,
    rewards: RewardService,
    weights: Mapping[str, float],
    progress: Progress,
) -> PendingSamples:
    """Returns when all samples are finished; some may still be being scored."""
    progress.phase(f"sampling {request.label}", len(request.row))
    started = clock.seconds()
    pieces, scoring = [], rewards.begin(request.row, request.step is None, weights)
    for piece in generated:
        scoring.add(piece.index, piece.samples)
        kept = [request.keep(i, s) for i, s in zip(piece.index, piece.samples, strict=True)]
        pieces.append(replace(piece, samples=kept))
        progress.advance(len(piece.samples))
    ended = clock.seconds()
    return PendingSamples(request, pieces, scoring, version, weights, started, ended, progress)


def _with_baseline(rollout: Rollout, greedy: Rollout) -> Rollout:
    """The rollout with the reward of each group's greedy sample. A sample fails if its greedy
    baseline has no score."""
    score_of = dict(zip(greedy.group.tolist(), greedy.scores, strict=True))
    baselines = [score_of[g] for g in rollout.group.tolist()]
    scores = [
        score
        if baseline.ok
        else Score.failed(f"scoring the greedy baseline of its prompt failed: {baseline.error}")
        for score, baseline in zip(rollout.scores, baselines, strict=True)
    ]
    values = [math.nan if b.value is None else b.value for b in baselines]
    return replace(rollout, scores=scores, greedy=torch.tensor(values, dtype=torch.float64))


def samples_and_scores(pending: PendingSamples) -> tuple[list[Sample], list[Score]]:
    """Without the traces, which may be of different sizes."""
    pending.progress.phase(f"scoring {pending.request.label}", pending.scoring.pending)
    scores = pending.scoring.result(pending.progress.advance).scores
    samples: dict[int, Sample] = {}
    for piece in pending.pieces:
        samples |= zip(piece.index, piece.samples, strict=True)
    return [samples[i] for i in range(len(samples))], list(scores)

"""The records that pass between the rooms: Prompt, Sample, Score, Conditioning, Trace, Rollout.

Shape legend, used all over the project:
    N samples · P prompts · S trained steps · C,H,W latent channels, height, width · L,D text
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

Which = Literal["current", "old", "reference", "ema"]
"""Which weights of the policy a forward pass uses."""

Weights = Mapping[str, "Tensor"]
"""The trained tensors by name; a transfer with a missing or an extra name raises."""


class UserError(ValueError):
    """Something the user can mend; one sentence: expected, got, where, what to do."""


class StopRun(RuntimeError):
    """The run cannot go on in a useful way; what was saved stays and `--resume` takes it up."""


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on nothing else: (run seed, step, sample…)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Prompt:
    """One row of the user's data; `columns` holds everything the row said beyond its text."""

    text: str
    negative: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""  # "train.txt:17", for messages


@dataclass(frozen=True)
class Sample:
    """One finished artifact, as a reward sees it: a picture of a model that draws, or the text of
    one that writes."""

    prompt: Prompt
    image: np.ndarray | None  # (height, width, 3) uint8, RGB
    seed: int
    text: str | None = None

    @property
    def picture(self) -> np.ndarray:
        """`image`, for whoever cannot do without."""
        if self.image is None:
            raise UserError("this sample is a text; expected a picture to look at")
        return self.image

    @property
    def reply(self) -> str:
        """`text`, for whoever cannot do without. An empty reply is a reply."""
        if self.text is None:
            raise UserError("this sample is a picture; expected a text to read")
        return self.text


@dataclass(frozen=True)
class Score:
    """A reward's answer. A failure is `error`, never a number.

    `parts` names every contribution ("ocr", "jpeg") and detail ("ocr/exact"); `text` is what a
    reward read or said, for people to look at.
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    error: str | None = None

    @staticmethod
    def failed(error: str) -> Score:
        return Score(value=None, error=error)

    @property
    def ok(self) -> bool:
        return self.error is None and self.value is not None and math.isfinite(self.value)


@dataclass(frozen=True)
class Conditioning:
    """Encoded prompts, one row each, and what else the model conditions on. A model leaves out
    what it does not use; prompts of different lengths need a mask."""

    embeds: Tensor  # (P, L, D)
    pooled: Tensor | None = None  # (P, D')
    mask: Tensor | None = None  # (P, L) bool: False is padding
    guidance: Tensor | None = None  # (P,): the scale, where the network itself takes it

    def rows(self, index: Tensor) -> Conditioning:
        return self._map(lambda tensor: tensor[index])

    def to(self, device: torch.device) -> Conditioning:
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Conditioning:
        return Conditioning(*(None if t is None else change(t) for t in self._tensors))

    @property
    def _tensors(self) -> tuple[Tensor | None, ...]:
        return self.embeds, self.pooled, self.mask, self.guidance

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors if tensor is not None)

    @staticmethod
    def stack(rows: Sequence[Conditioning]) -> Conditioning:
        """One after another, padded to the longest prompt among them."""
        import torch

        length = max(row.embeds.shape[1] for row in rows)
        columns = zip(*(row._padded(length)._tensors for row in rows), strict=True)
        return Conditioning(*(None if c[0] is None else torch.cat(c) for c in columns))

    def _padded(self, length: int) -> Conditioning:
        from torch.nn.functional import pad

        missing = length - self.embeds.shape[1]
        if missing == 0:
            return self
        assert self.mask is not None, "prompts of different lengths need a mask"
        return replace(
            self,
            embeds=pad(self.embeds, (0, 0, 0, missing)),
            mask=pad(self.mask, (0, missing), value=False),
        )


@dataclass(frozen=True)
class FlowContext:
    """What all samples of one sampling call share."""

    sigmas: Tensor  # (n+1,): the whole schedule, from 1 down to 0
    trained: range  # the S schedule indices that are trained
    cond: Conditioning  # (P, …)
    negative: Conditioning | None  # (P, …) when guided


@dataclass(frozen=True)
class FlowTrace:
    """What a flow model's training needs to see of how N samples came about.

    `latents[:, i]` and `latents[:, i + 1]` are the two ends of trained step i; an algorithm that
    needs no trajectory has S = 0. `clean` is the end of the whole path.
    """

    context: FlowContext
    row: Tensor  # (N,): sample → row of the context's conditioning
    latents: Tensor  # (N, S+1, C, H, W), or (N, 0, C, H, W) when no step is trained
    means: Tensor  # (N, S, C, H, W): of the trained steps; (N, 0, C, H, W) when nobody asked
    clean: Tensor  # (N, C, H, W)

    def rows(self, index: Tensor) -> FlowTrace:
        return FlowTrace(
            self.context,
            self.row[index],
            self.latents[index],
            self.means[index],
            self.clean[index],
        )

    @staticmethod
    def concat(pieces: Sequence[FlowTrace]) -> FlowTrace:
        """Pieces of one sampling call, in order."""
        import torch

        return FlowTrace(
            pieces[0].context,
            torch.cat([p.row for p in pieces]),
            torch.cat([p.latents for p in pieces]),
            torch.cat([p.means for p in pieces]),
            torch.cat([p.clean for p in pieces]),
        )


@dataclass(frozen=True)
class Rollout:
    """N samples with all that happened to them. Downstream of the sampler nobody asks which kind
    of model made it: S is denoising steps for a flow model and tokens for a language model."""

    samples: Sequence[Sample]  # N
    group: Tensor  # (N,): id of the prompt's group, given at sampling
    trace: FlowTrace
    logp: Tensor  # (N, S)
    version: int  # of the weights that made it
    scores: Sequence[Score]  # N
    weights: Mapping[str, float]  # of the rewards, by name

    def rows(self, index: Tensor) -> Rollout:
        picked = index.tolist()
        return Rollout(
            [self.samples[i] for i in picked],
            self.group[index],
            self.trace.rows(index),
            self.logp[index],
            self.version,
            [self.scores[i] for i in picked],
            self.weights,
        )

    @property
    def scored(self) -> Tensor:
        """Indices of the samples that have a score."""
        import torch

        return torch.tensor([i for i, score in enumerate(self.scores) if score.ok])

    @property
    def rewards(self) -> Tensor:
        """(N,) float64. Only for rollouts whose every sample is scored."""
        import torch

        return torch.tensor([score.value for score in self.scores], dtype=torch.float64)

    @property
    def components(self) -> Tensor:
        """(N, R) float64: every reward by itself, unweighted, in the order of `weights`."""
        import torch

        rows = [[score.parts[name] for name in self.weights] for score in self.scores]
        return torch.tensor(rows, dtype=torch.float64)


Solver = Literal["euler", "dpm2"]


@dataclass(frozen=True)
class SampleSpec:
    """How a batch is drawn. Steps in `stochastic` follow `rule`, the others the ODE `solver`."""

    steps: int
    height: int
    width: int
    rule: str = "flow-sde"
    noise: float = 0.0
    stochastic: range = range(0)
    trained: range = range(0)
    solver: Solver = "euler"
    guidance: float = 1.0
    weights: Which = "current"
    same_noise: bool = False  # a group starts from one noise; its first ODE steps are run once
    means: bool = False  # the trace keeps the means of the trained steps

"""The records that pass between the rooms: Prompt, Sample, Score, Conditioning, Trace, Rollout.

Shape legend, used all over the project:
    N samples · P prompts · S trained steps · C,H,W latent channels, height, width · L,D text
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image
    from torch import Tensor

Which = Literal["current", "old", "reference", "ema"]
"""Which weights of the policy a forward pass uses."""

Weights = Mapping[str, "Tensor"]
"""The trained tensors by name; a transfer with a missing or an extra name raises."""


PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Those that only decode; Pillow knows others, some of which run programs."""


class UserError(ValueError):
    """Something the user can mend; one sentence: expected, got, where, what to do."""


class StopRun(RuntimeError):
    """The run cannot go on in a useful way; what was saved stays and `--resume` takes it up."""


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on nothing else: (run seed, step, sample…)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Picture:
    """A picture that belongs to a prompt, not yet decoded: a file's path, or what a file holds."""

    path: str = ""
    data: bytes = field(default=b"", repr=False)

    def open(self) -> Image:
        """Decoded, as RGB."""
        from PIL import Image

        source = io.BytesIO(self.data) if self.data else self.path
        with Image.open(source, formats=PICTURE_FORMATS) as image:
            return image.convert("RGB")

    @property
    def size(self) -> tuple[int, int]:
        """Height and width, without decoding it."""
        from PIL import Image

        source = io.BytesIO(self.data) if self.data else self.path
        with Image.open(source, formats=PICTURE_FORMATS) as image:
            return image.height, image.width

    def read(self) -> bytes:
        """As a file holds it, still encoded."""
        if self.data:
            return self.data
        try:
            return Path(self.path).read_bytes()
        except OSError as error:
            raise UserError(f"picture {self.path} cannot be read: {error.strerror}") from error


@dataclass(frozen=True)
class Prompt:
    """One row of the user's data; `columns` holds everything the row said beyond its text.

    `messages` is the conversation a model that writes is asked to go on with, as chat templates
    take it: {"role", "content"}, the content a list of {"type": "text", "text"} and
    {"type": "image"} parts, one such part for each of `images`, in order. Without messages the
    conversation is one message of the user's: the pictures, then the text.
    """

    text: str
    negative: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""  # "train.txt:17", for messages
    images: tuple[Picture, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Sample:
    """One finished artifact, as a reward sees it: a picture of a model that draws, or the text of
    one that writes."""

    prompt: Prompt
    image: np.ndarray | None  # (height, width, 3) uint8, RGB
    seed: int
    text: str | None = None
    tokens: int | None = None  # of the text, as the model that wrote it counts

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
    """A reward's answer. A failure is `error`, never a number; no value and no error means that
    the reward does not apply to this sample.

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
    negatives: Tensor | None = None  # (N, S, C, H, W): velocities of the negative branch there
    slopes: Sequence[Weights] | None = None  # N: the gradient of a sample's summed log-probs each

    def rows(self, index: Tensor) -> FlowTrace:
        return FlowTrace(
            self.context,
            self.row[index],
            self.latents[index],
            self.means[index],
            self.clean[index],
            None if self.negatives is None else self.negatives[index],
            None if self.slopes is None else [self.slopes[i] for i in index.tolist()],
        )

    @staticmethod
    def concat(pieces: Sequence[FlowTrace]) -> FlowTrace:
        """Pieces of one sampling call, in order."""
        import torch

        negatives = [p.negatives for p in pieces if p.negatives is not None]
        slopes = [p.slopes for p in pieces if p.slopes is not None]
        return FlowTrace(
            pieces[0].context,
            torch.cat([p.row for p in pieces]),
            torch.cat([p.latents for p in pieces]),
            torch.cat([p.means for p in pieces]),
            torch.cat([p.clean for p in pieces]),
            torch.cat(negatives) if len(negatives) == len(pieces) else None,
            [own for piece in slopes for own in piece] if len(slopes) == len(pieces) else None,
        )


@dataclass(frozen=True)
class TokenPrompt:
    """A prompt as a model that writes reads it, on the CPU."""

    ids: Tensor  # (L,) long
    kinds: Tensor  # (L,) long: 0 text, 1 a place of a picture's features (mm_token_type_ids)
    pixels: Tensor | None = None  # (patches, …) as the image processor gives them, all pictures
    grid: Tensor | None = None  # (pictures, 3) long: patches in time, height and width

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class TokenTrace:
    """What training needs to see of how N replies came about. S is the longest reply; a reply is a
    row of `tokens` as far as `mask` goes and ends with the model's end token, unless it was cut."""

    prompts: Sequence[TokenPrompt]  # P
    row: Tensor  # (N,): sample → prompt
    tokens: Tensor  # (N, S) long
    mask: Tensor  # (N, S) bool: True on the reply, from its first token without a gap
    cut: Tensor  # (N,) bool: stopped by the limit of length

    def rows(self, index: Tensor) -> TokenTrace:
        return TokenTrace(
            self.prompts, self.row[index], self.tokens[index], self.mask[index], self.cut[index]
        )

    @staticmethod
    def concat(pieces: Sequence[TokenTrace]) -> TokenTrace:
        """Pieces of one sampling call, in order, padded to the longest reply."""
        import torch

        return TokenTrace(
            pieces[0].prompts,
            torch.cat([p.row for p in pieces]),
            widened([p.tokens for p in pieces]),
            widened([p.mask for p in pieces]),
            torch.cat([p.cut for p in pieces]),
        )

    @staticmethod
    def join(one: TokenTrace, other: TokenTrace) -> TokenTrace:
        """Traces of two sampling calls, each with its own prompts."""
        prompts = [*one.prompts, *other.prompts]
        moved = replace(other, prompts=prompts, row=other.row + len(one.prompts))
        return TokenTrace.concat([replace(one, prompts=prompts), moved])


def widened(pieces: Sequence[Tensor]) -> Tensor:
    """(n, s) tensors of different s → (Σ n, max s), with zeros on the right."""
    import torch
    from torch.nn.functional import pad

    width = max(piece.shape[1] for piece in pieces)
    return torch.cat([pad(piece, (0, width - piece.shape[1])) for piece in pieces])


@dataclass(frozen=True)
class Rollout:
    """N samples with all that happened to them. Downstream of the sampler nobody asks which kind
    of model made it: S is denoising steps for a flow model and tokens for a language model."""

    samples: Sequence[Sample]  # N
    group: Tensor  # (N,): id of the prompt's group, given at sampling
    trace: FlowTrace | TokenTrace
    logp: Tensor  # (N, S)
    version: int  # of the weights that made it
    scores: Sequence[Score]  # N
    weights: Mapping[str, float]  # of the rewards, by name
    greedy: Tensor | None = None  # (N,) float64: reward of the greedy reply to the same prompt

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
            None if self.greedy is None else self.greedy[index],
        )

    def aged(self) -> Rollout:
        """Without what only held for the weights it was drawn with."""
        if not isinstance(self.trace, FlowTrace):
            return self
        return replace(self, trace=replace(self.trace, negatives=None, slopes=None))

    @staticmethod
    def join(one: Rollout, other: Rollout) -> Rollout:
        """Replies of two sampling calls; no group of one is a group of the other."""
        import torch

        first = int(one.group.max()) + 1 if len(one.group) else 0
        return Rollout(
            [*one.samples, *other.samples],
            torch.cat([one.group, other.group + first]),
            TokenTrace.join(one.replies, other.replies),
            widened([one.logp, other.logp]),
            min(one.version, other.version),
            [*one.scores, *other.scores],
            one.weights,
        )

    @property
    def paths(self) -> FlowTrace:
        """The trace of a model that draws."""
        assert isinstance(self.trace, FlowTrace)
        return self.trace

    @property
    def replies(self) -> TokenTrace:
        """The trace of a model that writes."""
        assert isinstance(self.trace, TokenTrace)
        return self.trace

    @property
    def mask(self) -> Tensor:
        """(N, S) bool: True on the tokens of the replies."""
        return self.replies.mask

    @property
    def scored(self) -> Tensor:
        """Indices of the samples that have a score."""
        import torch

        good = [i for i, score in enumerate(self.scores) if score.ok]
        return torch.tensor(good, dtype=torch.long)

    @property
    def rewards(self) -> Tensor:
        """(N,) float64. Only for rollouts whose every sample is scored."""
        import torch

        return torch.tensor([score.value for score in self.scores], dtype=torch.float64)

    @property
    def components(self) -> Tensor:
        """(N, R) float64: every reward by itself, unweighted, in the order of `weights`. NaN where
        it does not apply."""
        import torch

        rows = [[s.parts.get(name, math.nan) for name in self.weights] for s in self.scores]
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
    apart: bool = False  # guidance's branches run one by one; the trace keeps the negative one
    slopes: bool = False  # the trace keeps the gradient of each sample's log-probs


@dataclass(frozen=True)
class ReplySpec:
    """How replies are written. Temperature 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    weights: Which = "current"

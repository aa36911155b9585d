"""Samples and how they were generated: Conditioning, traces, Rollout.

Shape legend, used throughout the project:
    N samples · P prompts · S trained steps · C,H,W latent channels, height, width · L,D text
Latents of videos have another axis, the frames: (N, C, F, H, W).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from gesso.devices import to_device
from gesso.types import Sample, Score, Weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")
Layout = tuple[tuple[int, int], ...]
"""Height and width of each reference image of a prompt, in tokens."""


def source_tokens(layout: Layout) -> int:
    return sum(height * width for height, width in layout)


@dataclass(frozen=True)
class Conditioning:
    """Encoded prompts, one row each, and further conditioning. Tensors that a model does not use
    are None; prompts of different lengths need a mask."""

    embeds: Tensor  # (P, L, D)
    pooled: Tensor | None = None  # (P, D')
    mask: Tensor | None = None  # (P, L) bool: False is padding
    guidance: Tensor | None = None  # (P,): the scale, for networks with guidance embeddings
    source: Tensor | None = None  # (P, R, D''): tokens of the reference images, zero-padded; or
    # (P, C, F, H, W): encoded frames
    layouts: tuple[Layout, ...] = ()  # P, with tokens in `source`: reference images of each prompt

    def rows(self, index: Tensor) -> Conditioning:
        """Selects rows and drops padding of `source` that they do not need."""
        selected = self._map(lambda tensor: tensor[index])
        if self.source is None or not self.layouts:
            return selected
        if len(set(self.layouts)) == 1:  # `index` may be on another device: it is not read
            return replace(selected, layouts=self.layouts[:1] * len(index))
        layouts = tuple(self.layouts[i] for i in index.tolist())
        longest = max(map(source_tokens, layouts), default=0)
        source = None if selected.source is None else selected.source[:, :longest]
        return replace(selected, source=source, layouts=layouts)

    @property
    def layout(self) -> Layout:
        """The reference images of every row of a batch: networks need the same in all rows."""
        (layout,) = set(self.layouts) or {()}
        return layout

    def alike(self, row: Tensor) -> list[Tensor]:
        """Indices into `row`, grouped into those that can be in one batch, in order."""
        import torch

        index = torch.arange(len(row), device=row.device)
        if len(set(self.layouts)) < 2:
            return [index]
        groups: dict[Layout, list[int]] = {}
        for i, r in enumerate(row.tolist()):
            groups.setdefault(self.layouts[r], []).append(i)
        return [index[group] for group in groups.values()]

    def to(self, device: torch.device) -> Conditioning:
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Conditioning:
        tensors = [None if t is None else change(t) for t in self._tensors]
        return Conditioning._of(tensors, self.layouts)

    @staticmethod
    def _of(tensors: Sequence[Tensor | None], layouts: tuple[Layout, ...]) -> Conditioning:
        embeds, pooled, mask, guidance, source = tensors
        assert embeds is not None
        return Conditioning(embeds, pooled, mask, guidance, source, layouts)

    @property
    def _tensors(self) -> tuple[Tensor | None, ...]:
        return self.embeds, self.pooled, self.mask, self.guidance, self.source

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors if tensor is not None)

    @staticmethod
    def stack(rows: Sequence[Conditioning]) -> Conditioning:
        """Concatenates the rows, padded to the longest prompt."""
        import torch

        length = max(row.embeds.shape[1] for row in rows)
        padded = [row.padded(length) for row in rows]
        if sources := [row.source for row in rows if row.source is not None]:
            longest = max(source.shape[1] for source in sources)
            padded = [row._source_padded(longest) for row in padded]
        columns = list(zip(*(row._tensors for row in padded), strict=True))
        for column in columns:
            assert len({tensor is None for tensor in column}) == 1, "some prompts lack a tensor"
        tensors = [None if c[0] is None else torch.cat(c) for c in columns]
        return Conditioning._of(tensors, tuple(one for row in rows for one in row.layouts))

    def _source_padded(self, tokens: int) -> Conditioning:
        from torch.nn.functional import pad

        assert self.source is not None, "some prompts lack a tensor"
        return replace(self, source=pad(self.source, (0, 0, 0, tokens - self.source.shape[1])))

    def padded(self, length: int) -> Conditioning:
        """Padded to that number of tokens."""
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
    """What the samples of one sampling call share."""

    sigmas: Tensor  # (n+1,): the whole schedule, from 1 down to 0
    cond: Conditioning  # (P, …)
    negative: Conditioning | None  # (P, …); None without guidance
    fine: Tensor | None = None  # the schedule in 1,000 steps, for times between its own

    @staticmethod
    def joined(
        contexts: Sequence[FlowContext], rows: Sequence[Tensor]
    ) -> tuple[FlowContext, list[Tensor]]:
        """Joins the contexts of several pieces; returns the joint context and the rows of each
        piece in it."""
        import torch

        distinct, starts = _distinct(contexts, lambda context: len(context.cond.embeds))
        first = distinct[0]
        if len(distinct) == 1:
            return first, list(rows)
        for other in distinct[1:]:
            assert torch.equal(first.sigmas, other.sigmas), "pieces of different schedules"
        negatives = [c.negative for c in distinct if c.negative is not None]
        assert len(negatives) in (0, len(distinct)), "some pieces are guided and others are not"
        context = FlowContext(
            first.sigmas,
            Conditioning.stack([c.cond for c in distinct]),
            Conditioning.stack(negatives) if negatives else None,
            first.fine,
        )
        return context, [row + start for row, start in zip(rows, starts, strict=True)]


@dataclass(frozen=True)
class FlowTrace:
    """How a flow model generated N samples, as far as training needs it.

    `latents[:, i]` and `latents[:, i + 1]` are the input and the output of trained step i; an
    algorithm that needs no trajectory has S = 0. `clean` is the final latent.
    """

    context: FlowContext
    row: Tensor  # (N,): sample → row of the context's conditioning
    steps: Tensor  # (N, S) long: trained step → index of the schedule
    latents: Tensor  # (N, S+1, C, H, W), or (N, 0, C, H, W) when no step is trained
    means: Tensor  # (N, S, C, H, W): of the trained steps; (N, 0, C, H, W) if not recorded
    clean: Tensor  # (N, C, H, W)
    negatives: Tensor | None = None  # (N, S, C, H, W): velocities of the negative branch
    per_sample_grads: Sequence[Weights] | None = None  # N: of each sample's summed log-probs

    def rows(self, index: Tensor) -> FlowTrace:
        grads = self.per_sample_grads
        return FlowTrace(
            self.context,
            self.row[index],
            self.steps[index],
            self.latents[index],
            self.means[index],
            self.clean[index],
            None if self.negatives is None else self.negatives[index],
            None if grads is None else [grads[i] for i in index.tolist()],
        )

    @staticmethod
    def concat(pieces: Sequence[FlowTrace]) -> FlowTrace:
        """Pieces of one batch, in order. Pieces of one sampling call share a context; pieces of
        several samplers each keep their conditioning."""
        import torch

        context, rows = FlowContext.joined([p.context for p in pieces], [p.row for p in pieces])
        negatives = [p.negatives for p in pieces if p.negatives is not None]
        grads = [p.per_sample_grads for p in pieces if p.per_sample_grads is not None]
        return FlowTrace(
            context,
            torch.cat(rows),
            torch.cat([p.steps for p in pieces]),
            torch.cat([p.latents for p in pieces]),
            torch.cat([p.means for p in pieces]),
            torch.cat([p.clean for p in pieces]),
            torch.cat(negatives) if len(negatives) == len(pieces) else None,
            [grad for piece in grads for grad in piece] if len(grads) == len(pieces) else None,
        )


@dataclass(frozen=True)
class TokenPrompt:
    """A tokenized prompt for a language model, on the CPU."""

    ids: Tensor  # (L,) long
    kinds: Tensor  # (L,) long: mm_token_type_ids, 0 text, 1 placeholder of image features
    pixels: Tensor | None = None  # (patches, …): pixel_values of all images
    grid: Tensor | None = None  # (images, 3) long: patches in time, height and width

    def __len__(self) -> int:
        return len(self.ids)

    def followed_by(self, tokens: Tensor) -> TokenPrompt:
        """The prompt followed by the first tokens of a response."""
        import torch

        ids, kinds = torch.cat([self.ids, tokens]), tokens.new_zeros(len(tokens))
        return replace(self, ids=ids, kinds=torch.cat([self.kinds, kinds]))


@dataclass(frozen=True)
class TokenTrace:
    """How N responses were generated, as far as training needs it; on the CPU. S is the length of
    the longest one. A response is the part of a row of `tokens` where `mask` is True; it ends with
    the model's EOS token, unless it was truncated."""

    prompts: Sequence[TokenPrompt]  # P
    row: Tensor  # (N,): sample → prompt
    tokens: Tensor  # (N, S) long
    mask: Tensor  # (N, S) bool: True on the response, contiguous from its first token
    cut: Tensor  # (N,) bool: truncated at the maximum length
    versions: Tensor | None = None  # (N, S) long: of each token's weights; None: the rollout's

    @cached_property
    def response_index(self) -> Tensor:
        """(R,): indices of the responses' tokens in a flattened (N, S) tensor. On a GPU, indexing
        with `mask` would wait for the number of tokens."""
        return self.mask.flatten().nonzero()[:, 0]

    def select(self, values: Tensor) -> Tensor:
        """(N, S) → (R,): the values of the responses' tokens."""
        return values.flatten()[to_device(self.response_index, values.device)]

    def spread(self, values: Tensor) -> Tensor:
        """(R, …) → (N, S, …): the reverse of `select`, 0 outside the responses."""
        blank = values.new_zeros(self.mask.numel(), *values.shape[1:])
        index = to_device(self.response_index, values.device)
        return blank.index_copy(0, index, values).unflatten(0, self.mask.shape)

    def rows(self, index: Tensor) -> TokenTrace:
        return TokenTrace(
            self.prompts,
            self.row[index],
            self.tokens[index],
            self.mask[index],
            self.cut[index],
            None if self.versions is None else self.versions[index],
        )

    @staticmethod
    def concat(pieces: Sequence[TokenTrace]) -> TokenTrace:
        """Pieces of one batch, in order, padded to the longest response. Pieces of one sampling
        call share their prompts; pieces of several calls each keep theirs."""
        import torch

        distinct, starts = _distinct([p.prompts for p in pieces], len)
        versions = [p.versions for p in pieces if p.versions is not None]
        return TokenTrace(
            distinct[0] if len(distinct) == 1 else [p for prompts in distinct for p in prompts],
            torch.cat([p.row + start for p, start in zip(pieces, starts, strict=True)]),
            widened([p.tokens for p in pieces]),
            widened([p.mask for p in pieces]),
            torch.cat([p.cut for p in pieces]),
            widened(versions) if len(versions) == len(pieces) else None,
        )


def _distinct(shared: Sequence[T], size: Callable[[T], int]) -> tuple[list[T], list[int]]:
    """The distinct objects that pieces share, and for each piece the offset of its object in their
    concatenation."""
    offsets: dict[int, int] = {}
    distinct: list[T] = []
    for item in shared:
        if id(item) not in offsets:
            offsets[id(item)] = sum(size(other) for other in distinct)
            distinct.append(item)
    return distinct, [offsets[id(item)] for item in shared]


def widened(pieces: Sequence[Tensor]) -> Tensor:
    """(n, s) tensors of different s → (Σ n, max s), zero-padded on the right."""
    import torch
    from torch.nn.functional import pad

    width = max(piece.shape[1] for piece in pieces)
    return torch.cat([pad(piece, (0, width - piece.shape[1])) for piece in pieces])


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

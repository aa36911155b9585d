"""How samples of flow models were generated: Conditioning and FlowTrace. Shape legend in
`rollout.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gesso.traces.pieces import distinct_of
from gesso.types import Weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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

        distinct, starts = distinct_of(contexts, lambda context: len(context.cond.embeds))
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

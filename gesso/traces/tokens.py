"""How responses of language models were generated: TokenPrompt and TokenTrace. Shape legend in
`rollout.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from gesso.devices import to_device
from gesso.traces.pieces import distinct_of, widened

if TYPE_CHECKING:
    from torch import Tensor


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

        distinct, starts = distinct_of([p.prompts for p in pieces], len)
        versions = [p.versions for p in pieces if p.versions is not None]
        return TokenTrace(
            distinct[0] if len(distinct) == 1 else [p for prompts in distinct for p in prompts],
            torch.cat([p.row + start for p, start in zip(pieces, starts, strict=True)]),
            widened([p.tokens for p in pieces]),
            widened([p.mask for p in pieces]),
            torch.cat([p.cut for p in pieces]),
            widened(versions) if len(versions) == len(pieces) else None,
        )

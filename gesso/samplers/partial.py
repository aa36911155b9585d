"""Responses that are sampled in several calls, between which the weights may change (`partial`).

Every token keeps its log-prob and the version of the weights that sampled it. The next call
prefills prompt and response so far with its own weights, and draws the next tokens from the numbers
that the sample's seed has for their positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PartialResponse:
    """A response so far, on the CPU."""

    tokens: Tensor  # (s,) long
    logp: Tensor  # (s,) float32
    versions: Tensor  # (s,) long: of the weights that sampled each token
    done: bool

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.tokens, self.logp, self.versions

    @staticmethod
    def new() -> PartialResponse:
        none = torch.zeros(0, dtype=torch.long)
        return PartialResponse(none, none.float(), none, False)


@dataclass(frozen=True)
class Begun:
    """The responses of a call so far, each of which gets up to `limit` more tokens. With limit 0
    all of them are done: the call returns them without sampling."""

    responses: Sequence[PartialResponse]  # one per sample
    limit: int

    @property
    def oldest(self) -> int:
        """The first version that sampled a token."""
        return min(int(response.versions.min()) for response in self.responses)

    def pack(self) -> bytes:
        from safetensors.torch import save

        return save(tensors_of(self.responses) | {"limit": torch.tensor([self.limit])})

    @staticmethod
    def read(data: bytes) -> Begun:
        from safetensors.torch import load

        tensors = load(data)
        return Begun(responses_of(tensors), int(tensors["limit"]))


def tensors_of(responses: Sequence[PartialResponse]) -> dict[str, Tensor]:
    """The tokens of all responses, one after the other."""
    return {
        "lengths": torch.tensor([len(response.tokens) for response in responses]),
        "done": torch.tensor([response.done for response in responses]),
        "tokens": torch.cat([response.tokens for response in responses]),
        "logp": torch.cat([response.logp for response in responses]),
        "versions": torch.cat([response.versions for response in responses]),
    }


def responses_of(tensors: Mapping[str, Tensor]) -> list[PartialResponse]:
    """The reverse of `tensors_of`."""
    lengths = tensors["lengths"].tolist()
    columns = [tensors[name].split(lengths) for name in ("tokens", "logp", "versions")]
    rows = zip(*columns, tensors["done"].tolist(), strict=True)
    return [PartialResponse(*row) for row in rows]


def options(begun: Begun | None) -> dict[str, Any]:
    """For `Sampler.sample`: of all samplers only `DecodingSampler` continues responses."""
    return {} if begun is None else {"begun": begun}

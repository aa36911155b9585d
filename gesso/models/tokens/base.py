"""The protocol of language models and vision-language models.

`transformer.py` implements it for any decoder of transformers; `causal.py` and
`vision_language.py` hold the differences between text-only models and models that take images.

Shape legend, in addition to that of `types.py`:
    T tokens of several sequences, concatenated · R response tokens among them · D width · V ids
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gesso.rollout import TokenPrompt, TokenTrace
from gesso.types import Prompt, Which
from gesso.weights.merge import SHARD
from gesso.weights.policy import Policy
from gesso.weights.roles import RunnableWeights


@dataclass(frozen=True)
class ResponseLogp:
    """Of every response token, 0 outside the responses."""

    logp: Tensor  # (N, S) float32, differentiable
    entropy: Tensor  # (N, S) float32, of the distribution the token was drawn from; detached


@dataclass(frozen=True)
class Read:
    """A prefilled prompt: all that is needed to generate responses to it."""

    keys: Sequence[Tensor]  # a layer: (heads, L, head width)
    values: Sequence[Tensor]
    state: Tensor  # (D,) of its last token: predicts the response's first
    position: int  # of the response's first token


class ValueFunction(Protocol):
    def values(self, trace: TokenTrace) -> Tensor:
        """(N, S): the value of a response before each of its tokens, 0 outside; differentiable."""


class TokenModel(Protocol):
    device: torch.device
    end: frozenset[int]  # ids that end a response
    suppressed: Tensor  # ids that are never generated: probability 0, in sampling and in `logp`
    allowed: Tensor  # (V,) bool: the others
    max_prompt: int  # tokens
    max_positions: int | None  # tokens that its positions reach; None: no limit

    @property
    def policy(self) -> RunnableWeights: ...

    def encode(self, prompt: Prompt) -> TokenPrompt:
        """Through the model's own chat template and image processor."""

    def length(self, prompt: Prompt) -> int:
        """How many tokens `encode` would give, at little cost."""

    def decode(self, tokens: Sequence[int]) -> str:
        """A response as text, without its special tokens."""

    def logp(
        self, trace: TokenTrace, temperature: float, weights: Which = "current"
    ) -> ResponseLogp:
        """log softmax(logits / temperature) at every response token, in one pass without padding.
        Temperature 0 chooses the likeliest token and leaves the distribution as temperature 1
        does."""

    def hidden(self, trace: TokenTrace, weights: Which = "current") -> Tensor:
        """(N, S, D): the last layer's state from which each response token was drawn,
        0 outside."""

    def save(self, folder: Path, merged: bool = False, shard: str = SHARD) -> None:
        """The current weights for plain transformers: a PEFT adapter, or the whole model in files
        of at most `shard`; with tokenizer, processor and generation config."""

    # What a sampler needs. It calls the last four within what `writing` gives it.

    @property
    def recordable(self) -> bool:
        """Whether `step` may be recorded as a CUDA graph and replayed."""

    def writing(self, weights: Which) -> Callable[[], AbstractContextManager]:
        """Creates the contexts in which the passes of one sampling call run: with those weights, in
        the model's precision."""

    def read(self, prompts: Sequence[TokenPrompt]) -> list[Read]:
        """All of them in one pass."""

    def step(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """One token for each of n sequences: (n,), (n,), (n, length) bool → states (n, D)."""

    def raw_logits(self, states: Tensor) -> Tensor:
        """(n, D) → (n, V) as the head gives them."""

    def logits(self, states: Tensor, temperature: float) -> Tensor:
        """(n, D) → (n, V) float32, divided by the temperature, suppressed ids at −∞."""


class TrainableTokenModel(TokenModel, Protocol):
    """The same for the learner and for loading, which may change its weights."""

    @property
    def policy(self) -> Policy: ...

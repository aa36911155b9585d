"""The protocol of language models and vision-language models.

`transformer.py` implements it for any decoder of transformers; `causal.py` and
`vision_language.py` contain the differences between text-only models and models with image inputs.

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

from gesso.traces.tokens import TokenPrompt, TokenTrace
from gesso.types import Prompt, Which
from gesso.weights.merge import SHARD
from gesso.weights.policy import Policy
from gesso.weights.roles import RunnableWeights


@dataclass(frozen=True)
class ResponseLogp:
    """Log-probs of the response tokens, 0 outside the responses."""

    logp: Tensor  # (N, S) float32, differentiable
    entropy: Tensor  # (N, S) float32, of the distribution the token was sampled from; detached


@dataclass(frozen=True)
class PrefilledPrompt:
    """The state from which responses to a prompt are generated."""

    keys: Sequence[Tensor]  # per layer: (heads, L, head width)
    values: Sequence[Tensor]
    state: Tensor  # (D,) of the last token: predicts the first response token
    position: int  # of the first response token


class ValueFunction(Protocol):
    def values(self, trace: TokenTrace) -> Tensor:
        """(N, S): the value before each response token, 0 outside; differentiable."""


class TokenModel(Protocol):
    device: torch.device
    end: frozenset[int]  # ids that end a response
    suppressed: Tensor  # ids that are never generated: probability 0, in sampling and in `logp`
    allowed: Tensor  # (V,) bool: all other ids
    max_prompt: int  # tokens
    max_positions: int | None  # maximum number of tokens of its positions; None: no limit

    @property
    def policy(self) -> RunnableWeights: ...

    def encode(self, prompt: Prompt) -> TokenPrompt:
        """Uses the chat template and image processor of the model."""

    def length(self, prompt: Prompt) -> int:
        """Number of tokens that `encode` would return, at little cost."""

    def decode(self, tokens: Sequence[int]) -> str:
        """A response as text, without special tokens."""

    def logp(
        self, trace: TokenTrace, temperature: float, weights: Which = "current"
    ) -> ResponseLogp:
        """log softmax(logits / temperature) at every response token, in one pass without padding.
        Temperature 0 (greedy) uses the distribution of temperature 1."""

    def hidden(self, trace: TokenTrace, weights: Which = "current") -> Tensor:
        """(N, S, D): the last layer's state that predicts each response token, 0 outside."""

    def save(self, folder: Path, merged: bool = False, shard: str = SHARD) -> None:
        """Saves the current weights for transformers: a PEFT adapter, or the whole model in files
        of at most `shard`; with tokenizer, processor and generation config."""

    # For samplers, which call the last four methods within the contexts of `generating`.

    @property
    def recordable(self) -> bool:
        """Whether `step` may be recorded as a CUDA graph and replayed."""

    def generating(self, weights: Which) -> Callable[[], AbstractContextManager]:
        """Returns a factory of the contexts in which the passes of one sampling call run: with
        those weights, in the model's precision."""

    def prefill(self, prompts: Sequence[TokenPrompt]) -> list[PrefilledPrompt]:
        """Prefills all prompts in one pass."""

    def step(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """One token for each of n sequences: (n,), (n,), (n, length) bool → states (n, D)."""

    def raw_logits(self, states: Tensor) -> Tensor:
        """(n, D) → (n, V), the output of the head."""

    def logits(self, states: Tensor, temperature: float) -> Tensor:
        """(n, D) → (n, V) float32, divided by the temperature, suppressed ids at −∞."""


class ResponseEncoder(Protocol):
    """What a language model must have in addition, to be trained on responses of the data."""

    def encode_response(self, prompt: Prompt, text: str) -> Tensor:
        """(s,) long: the tokens that follow the encoded prompt if the response is this text, the
        last one an id of `end`."""


class TrainableTokenModel(TokenModel, Protocol):
    """The same for the learner and for loading, which may change the weights."""

    @property
    def policy(self) -> Policy: ...

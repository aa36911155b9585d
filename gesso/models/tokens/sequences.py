"""The input of a packed pass: prompts with their responses, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gesso.traces.tokens import TokenPrompt


@dataclass(frozen=True)
class Sequences:
    """Concatenated prompts, each followed by its responses, on the model's device."""

    ids: Tensor  # (T,)
    positions: Tensor  # (rows, T)
    prompts: Sequence[TokenPrompt]
    lengths: Sequence[Sequence[int]]  # per prompt: its length, then those of its responses


def distinct(prompts: Sequence[TokenPrompt]) -> dict[int, TokenPrompt]:
    """Distinct prompts by identity: the samples of a group share one prompt object."""
    return {id(prompt): prompt for prompt in prompts}

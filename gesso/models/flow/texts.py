"""Lengths of prompts in tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gesso.models.flow.base import TextEncoder


@dataclass(frozen=True)
class TextLength:
    """Number of prompt tokens that a model supports: default, minimum and maximum."""

    default: int
    least: int
    most: int


def text_encoder(name: str, limit: int, tokenizer: Any) -> TextEncoder:
    """Its count includes special tokens; the tokenizer's warning about long texts is silenced."""

    def tokens(text: str) -> int:
        return len(tokenizer(text, truncation=False, verbose=False).input_ids)

    return TextEncoder(name, limit, tokens)


def chat_encoder(name: str, limit: int, tokenizer: Any, enable_thinking: bool) -> TextEncoder:
    """A text encoder whose pipeline puts the prompt into the tokenizer's chat template, which its
    count includes."""
    whole = text_encoder(name, limit, tokenizer)

    def tokens(text: str) -> int:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=enable_thinking,
        )
        return whole.tokens(chat)

    return replace(whole, tokens=tokens)

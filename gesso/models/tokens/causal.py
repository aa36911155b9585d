"""Text-only language models: Llama 3, Qwen2, Qwen2.5, Qwen3 and models distilled into them
(DeepSeek-R1), through transformers' AutoModelForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from gesso import config
from gesso.models.tokens.loading import chat_template
from gesso.models.tokens.sequences import Sequences
from gesso.models.tokens.transformer import PROJECTIONS, TransformerModel
from gesso.traces.tokens import TokenPrompt
from gesso.types import Prompt, UserError


class Causal(TransformerModel):
    kinds: ClassVar[Mapping[str, str]] = {
        "llama": "Llama (llama)",
        "qwen2": "Qwen2 and Qwen2.5 (qwen2)",
        "qwen3": "Qwen3 (qwen3)",
    }
    auto = "AutoModelForCausalLM"
    other = "vision-language"

    @property
    def decoder(self) -> Any:
        return self.module.model

    def _template(self, settings: config.TokenModel) -> str:
        return chat_template(self.tokenizer.chat_template, settings.path)

    def _trained(self, settings: config.TokenModel) -> tuple[list[str], str]:
        return list(PROJECTIONS), ""

    def _messages(self, prompt: Prompt) -> list[dict[str, Any]]:
        messages = prompt.messages or ({"role": "user", "content": prompt.text},)
        return [_plain(message, prompt.where) for message in messages]

    def encode(self, prompt: Prompt) -> TokenPrompt:
        if prompt.images:
            raise UserError(
                f"{prompt.where}: got an image, but {type(self.module).__name__} takes only text; "
                'use a vision-language model, with model.name = "vision-language"'
            )
        text = self._chat(self._messages(prompt), prompt.where)
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
        return TokenPrompt(ids, torch.zeros_like(ids))

    def _positions(self, prompt: TokenPrompt) -> Tensor:
        return torch.arange(len(prompt))[None]

    def _rows(self, positions: Tensor) -> Tensor:
        return positions[0]

    def _embed(self, sequences: Sequences) -> dict[str, Any]:
        return {"inputs_embeds": self.module.get_input_embeddings()(sequences.ids)[None]}


def _plain(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The chat templates of text-only models expect the content of a message as one string."""
    content = message["content"]
    if isinstance(content, str):
        return dict(message)
    if odd := next((part for part in content if part["type"] != "text"), None):
        raise UserError(
            f'{where}: a message contains a part of type "{odd["type"]}", expected "text"'
        )
    return {**message, "content": "".join(part["text"] for part in content)}

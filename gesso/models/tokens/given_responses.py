"""The tokens of given responses, as they follow an encoded prompt."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from gesso.types import UserError


def response_ids(
    tokenizer: Any, start: str, whole: str, end: Collection[int], never: Collection[int], where: str
) -> Tensor:
    """(s,): the tokens of `whole`, a conversation as the chat template writes it, after `start`, up
    to the first id of `end`. If the template writes none, the tokenizer's EOS token is added.
    `never`: ids that the model does not generate."""
    if not whole.startswith(start):
        raise UserError(
            f"{where}: with the model's chat template, a conversation does not begin with its "
            "prompt, so given responses cannot be trained on; use a model with another template"
        )
    ids: list[int] = tokenizer(whole[len(start) :], add_special_tokens=False).input_ids
    ends = [i for i, token in enumerate(ids) if token in end]
    if not ends:
        ids, ends = [*ids, tokenizer.eos_token_id], [len(ids)]
    last = ends[0]
    odd = [token for token in ids[:last] if token in never]
    if tokenizer.decode(ids[last + 1 :]).strip():  # text after the end
        odd.append(ids[last])
    if odd:
        token = tokenizer.convert_ids_to_tokens(odd[0])
        raise UserError(
            f"{where}: the response contains {token}, a special token of the model; remove it"
        )
    return torch.tensor(ids[: last + 1])

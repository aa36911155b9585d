"""Samples that a row gives for training, for `sampler.engine = "data"`.

SFT, images           `image`, or `file_name` as in Hugging Face's imagefolder, whose `text` is the
                      prompt; of edits `target_image`, and `image` is the input
SFT, videos           `video`, or `file_name`; `image` is the input
SFT, texts            `response`, or `completion` (TRL); or messages that end with the assistant's
DPO                   `chosen` and `rejected`: images, videos or texts
TRL, conversational   a text may be messages, the last one the assistant's; those before it are the
                      prompt, which then needs no column

The chosen samples of a DPO file are accepted for SFT, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gesso.data import chat
from gesso.data.images import InvalidRow, short
from gesso.types import UserError

ALIASES = {
    "image": ("target_image", "image", "file_name", "chosen"),
    "target_image": ("target_image", "chosen"),
    "video": ("video", "file_name", "chosen"),
    "response": ("response", "completion", "chosen"),
}  # a sample's name → columns, in order of precedence
MESSAGES = ("messages", "message")
CAPTION = "text"  # the prompt's column in an imagefolder


@dataclass(frozen=True)
class GivenColumns:
    """The columns of given samples."""

    names: Sequence[str]  # of the samples, the best first
    kind: Literal["image", "video", "text"]
    required: bool = True  # False: rows may have the columns, which are not used
    frames: int = 1  # of each video
    fps: float = 16.0
    continued: bool = False  # a row without `image` has its first clip as input image

    def split(self, row: Mapping[str, Any], prompt: str, where: str) -> GivenRow:
        """`prompt`: the column that gets a prompt which is part of the samples."""
        rest = dict(row)
        columns = [next((c for c in _columns(name) if c in rest), None) for name in self.names]
        values = [rest.pop(column) for column in columns if column is not None]
        edits = "target_image" in columns
        for name in [*([] if edits else self.names), "chosen", "rejected"]:
            rest.pop(name, None)
        if self.kind != "text":
            if prompt not in rest and CAPTION in rest:
                rest[prompt] = rest.pop(CAPTION)
        else:
            values = self._texts(rest, values, prompt)
        if self.required and len(values) < len(self.names):
            expected = " and ".join(f'"{name}"' for name in self.names)
            more = " or messages that end with the assistant's" * (self.names[0] == "response")
            raise UserError(
                f"{where}: expected {'columns' if len(self.names) > 1 else 'a column'} {expected}"
                f"{more}, which the algorithm trains on, got {', '.join(row) or 'no columns'}"
            )
        if self.required and len(values) > 1 and values[0] == values[1]:
            raise InvalidRow(f'"{self.names[0]}" and "{self.names[1]}" are equal: no preference')
        return GivenRow(rest, values if self.required else [])

    def _texts(self, rest: dict[str, Any], values: Sequence[Any], prompt: str) -> list[Any]:
        """Texts; messages before them become the prompt."""
        conversation = next((c for c in MESSAGES if c in rest), None)
        if not values and len(self.names) == 1 and conversation is not None:
            messages = chat.parse_messages(rest[conversation], required=True)
            if _ends_with_reply(messages):
                values = [rest.pop(conversation)]
                if len(messages) == 1:
                    raise InvalidRow("expected a message before the assistant's, got none")
        replies = [_reply(value) for value in values]
        before = [messages for messages, _ in replies if messages]
        if before:
            if any(messages != before[0] for messages in before):
                raise InvalidRow('the messages before "chosen" and "rejected" differ')
            if prompt in rest and not _same(rest[prompt], before[0]):
                raise InvalidRow(
                    f'the messages before the assistant\'s last one differ from "{prompt}"'
                )
            rest[prompt] = before[0]
        return [text for _, text in replies]


@dataclass(frozen=True)
class GivenRow:
    rest: dict[str, Any]  # the row without its samples
    samples: list[Any]


def _columns(name: str) -> Sequence[str]:
    return ALIASES.get(name, (name,))


def _ends_with_reply(messages: Any) -> bool:
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"


def _same(prompt: Any, messages: Sequence[Any]) -> bool:
    prompt = chat.parse_messages(prompt, required=False)
    if not isinstance(prompt, str | list):
        return False
    return chat.conversation(prompt).messages == chat.conversation(list(messages)).messages


def _reply(value: Any) -> tuple[list[Any], str]:
    """The messages before the assistant's last one, and its text."""
    value = chat.parse_messages(value, required=False)
    if isinstance(value, str):
        return [], value
    if not _ends_with_reply(value):
        raise InvalidRow(
            f"expected a text, or messages that end with the assistant's, got {short(value)}"
        )
    content = value[-1].get("content")
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise InvalidRow(f"expected text as the assistant's content, got {short(content)}")
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    plain = [text for text in texts if isinstance(text, str)]
    if len(plain) < len(texts):
        raise InvalidRow(f"expected text as the assistant's content, got {short(content)}")
    return list(value[:-1]), "".join(plain)

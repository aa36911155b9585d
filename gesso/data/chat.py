"""Prompts with images as conversations: tags, messages, the recipe's template and system prompt.

A conversation is a list of {"role", "content"}, the content a list of {"type": "text", "text"} and
{"type": "image"} parts. `<image>` in a text is the placeholder of an image, in every format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gesso.config import ChatSettings, Data, resolve_path
from gesso.data.images import InvalidRow, first_line, short
from gesso.types import UserError

TAG = "<image>"
IMAGE_KEYS = ("image", "path", "url", "base64")  # of an image part with an embedded image

ContentPart = dict[str, str]
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    messages: list[Message]
    images: list[Any]  # embedded in image parts that are more than placeholders


class Template:
    """A jinja template around the user's question: `content`, and the row's columns by name."""

    def __init__(self, template: str) -> None:
        from jinja2 import StrictUndefined, TemplateSyntaxError, meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self.name, text = _template_text(template)
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
        try:
            used = meta.find_undeclared_variables(environment.parse(text.strip()))
            self._template = environment.from_string(text.strip())
        except TemplateSyntaxError as error:
            raise UserError(f"{self.name}: line {error.lineno}: {error.message}") from error
        if "content" not in used:
            raise UserError(f"{self.name}: must contain {{{{ content }}}}, the user's question")

    def render(self, content: str, columns: Mapping[str, Any], where: str) -> str:
        from jinja2 import UndefinedError

        try:
            return self._template.render({**columns, "content": content})
        except UndefinedError as error:
            known = ", ".join(["content", *columns])
            raise UserError(f"{where}: {self.name}: {error.message}; known: {known}") from error
        except Exception as error:  # the template is user code
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(f"{where}: {self.name} failed: {reason}") from error


def _template_text(template: str) -> tuple[str, str]:
    """Returns (name for error messages, text): `template` itself, or the content of that file."""
    if re.search(r"\{\{|\{%|\n", template):
        return "data.template", template
    try:
        return f"data.template {template}", resolve_path(template).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(
            f'data.template = "{template}": no such file; expected a file, or a template that '
            "contains {{ content }}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.template {template} cannot be read: {first_line(error)}") from error


@dataclass(frozen=True)
class ChatFormat:
    """The template and the system prompt that a recipe applies to every prompt."""

    template: Template | None = None
    system: str | None = None

    @staticmethod
    def of(data: Data | ChatSettings) -> ChatFormat:
        return ChatFormat(None if data.template is None else Template(data.template), data.system)


PLAIN = ChatFormat()


def parse_messages(value: Any, required: bool) -> Any:
    """Parses a text that is a JSON list of messages; `required` (LMM-R1): any other text raises."""
    if not isinstance(value, str):
        return value
    if not required and not re.match(r'\s*\[\s*\{\s*"(role|content)"', value):
        return value
    try:
        messages = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRow(f"expected messages as JSON, got {short(value)}: {error}") from None
    if not isinstance(messages, list):
        raise InvalidRow(f"expected a list of messages, got {short(value)}")
    return messages


def conversation(prompt: str | list[Any]) -> Conversation:
    """Normalises a prompt; a text becomes one user message."""
    raw = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    images: list[Any] = []
    messages = [_message(message, i, images) for i, message in enumerate(raw, 1)]
    if not any(message["role"] == "user" for message in messages):
        raise InvalidRow(f"expected a user message, got roles: {_roles(messages)}")
    if messages[-1]["role"] == "assistant":
        raise InvalidRow("the last message is an assistant message; expected a user message")
    return Conversation(messages, images)


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(message["role"] for message in messages) or "none"


def _message(raw: Any, number: int, images: list[Any]) -> Message:
    """A message with its content in parts; embedded images are appended to `images`."""
    if not isinstance(raw, dict) or not isinstance(raw.get("role"), str):
        raise InvalidRow(f'message {number}: expected {{"role", "content"}}, got {short(raw)}')
    content = raw.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise InvalidRow(
            f"message {number}: expected text or a list of parts as content, got {short(content)}"
        )
    result: list[ContentPart] = []
    for part in parts:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            result += split(part["text"])
        elif kind in ("image", "image_url"):
            image = _embedded_image(part)
            images += [] if image is None else [image]
            result.append({"type": "image"})
        else:
            raise InvalidRow(f"message {number}: expected a text or image part, got {short(part)}")
    return {"role": raw["role"], "content": result}


def _embedded_image(part: Mapping[str, Any]) -> Any:
    if part["type"] == "image_url":
        url = part.get("image_url")
        return url.get("url") if isinstance(url, dict) else url
    return next((part[key] for key in IMAGE_KEYS if part.get(key) is not None), None)


def split(text: str) -> list[ContentPart]:
    """Splits a text at its tags: an image part for each tag, text parts between them."""
    parts: list[ContentPart] = []
    for i, piece in enumerate(text.split(TAG)):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def question(messages: Sequence[Message]) -> str:
    """The text of the user's last message, without its images."""
    texts = [
        part["text"].strip()
        for part in _last_user_message(messages)["content"]
        if part["type"] == "text"
    ]
    return " ".join(text for text in texts if text)


def _last_user_message(messages: Sequence[Message]) -> Message:
    return next(message for message in reversed(messages) if message["role"] == "user")


def apply_format(
    messages: Sequence[Message], chat_format: ChatFormat, columns: Mapping[str, Any], where: str
) -> list[Message]:
    """Renders the last user message with the recipe's template and prepends its system prompt."""
    result = list(messages)
    if chat_format.template is not None:
        last = _last_user_message(result)
        text = "".join(TAG if p["type"] == "image" else p["text"] for p in last["content"])
        content = split(chat_format.template.render(text, columns, where))
        result = [{**m, "content": content} if m is last else m for m in result]
    if chat_format.system is not None and not any(m["role"] == "system" for m in result):
        system = [{"type": "text", "text": chat_format.system}]
        result.insert(0, {"role": "system", "content": system})
    return result


def match_images(
    messages: Sequence[Message], embedded: Sequence[Any], attached: Sequence[Any]
) -> tuple[list[Message], list[Any]]:
    """Returns (messages, images) with exactly one image part per image. The images are `embedded`
    in the messages, or `attached` to the row: attached images fill the placeholders in order or,
    without placeholders, precede the content of the first user message."""
    placeholders = sum(
        part["type"] == "image" for message in messages for part in message["content"]
    )
    if embedded and attached:
        raise InvalidRow(
            "expected images either in the messages or in the image column, got "
            f"{len(embedded)} and {len(attached)}"
        )
    images = list(embedded or attached)
    if not placeholders and images:
        first = next(message for message in messages if message["role"] == "user")
        content = [*({"type": "image"} for _ in images), *first["content"]]
        return [{**m, "content": content} if m is first else m for m in messages], images
    if placeholders != len(images):
        raise InvalidRow(
            f"expected one image per {TAG} placeholder, got {len(images)} for {placeholders}"
        )
    return list(messages), images

"""Questions with pictures as conversations: tags, messages, the recipe's template and system text.

A conversation is a list of {"role", "content"}, the content a list of {"type": "text", "text"} and
{"type": "image"} parts. `<image>` in a text is the place of a picture, in every format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gesso.config import ChatSettings, Data, resolve_path
from gesso.data.pictures import Unsound, first_line, short
from gesso.types import UserError

TAG = "<image>"
GIVEN = ("image", "path", "url", "base64")  # where an image part may hold its picture

Part = dict[str, str]
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    messages: list[Message]
    pictures: list[Any]  # what image parts hold, where they are not just places


class Template:
    """A jinja template around the user's question: `content`, and the row's columns by name."""

    def __init__(self, given: str) -> None:
        from jinja2 import StrictUndefined, TemplateSyntaxError, meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self.name, text = _template_text(given)
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
        try:
            used = meta.find_undeclared_variables(environment.parse(text.strip()))
            self._template = environment.from_string(text.strip())
        except TemplateSyntaxError as error:
            raise UserError(f"{self.name}: line {error.lineno}: {error.message}") from error
        if "content" not in used:
            raise UserError(f"{self.name}: expected {{{{ content }}}}, the question, in it")

    def around(self, content: str, columns: Mapping[str, Any], where: str) -> str:
        from jinja2 import UndefinedError

        try:
            return self._template.render({**columns, "content": content})
        except UndefinedError as error:
            known = ", ".join(["content", *columns])
            raise UserError(f"{where}: {self.name}: {error.message}; there is {known}") from error
        except Exception as error:  # the template is a program of the user's
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(f"{where}: {self.name} failed: {reason}") from error


def _template_text(given: str) -> tuple[str, str]:
    """Its name in messages, and the template: what the recipe says, or the file it names."""
    if re.search(r"\{\{|\{%|\n", given):
        return "data.template", given
    try:
        return f"data.template {given}", resolve_path(given).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(
            f'data.template = "{given}": no such file; expected one, or a template with '
            "{{ content }} in it"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.template {given} cannot be read: {first_line(error)}") from error


@dataclass(frozen=True)
class Form:
    """What a recipe puts around every question."""

    template: Template | None = None
    system: str | None = None

    @staticmethod
    def of(data: Data | ChatSettings) -> Form:
        return Form(None if data.template is None else Template(data.template), data.system)


PLAIN = Form()


def parsed(asked: Any, must: bool) -> Any:
    """Messages where a text is a list of them in JSON, as it `must` be in LMM-R1's column."""
    if not isinstance(asked, str) or not (
        must or re.match(r'\s*\[\s*\{\s*"(role|content)"', asked)
    ):
        return asked
    try:
        found = json.loads(asked)
    except (ValueError, RecursionError) as error:
        raise Unsound(f"expected messages as JSON, got {short(asked)}: {error}") from None
    if not isinstance(found, list):
        raise Unsound(f"expected a list of messages, got {short(asked)}")
    return found


def conversation(asked: str | list[Any]) -> Conversation:
    """A question, or messages."""
    given = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    pictures: list[Any] = []
    messages = [_message(message, i, pictures) for i, message in enumerate(given, 1)]
    if not any(message["role"] == "user" for message in messages):
        raise Unsound(f"expected a message of the user's, found {_roles(messages)}")
    if messages[-1]["role"] == "assistant":
        raise Unsound("the last message is the assistant's already; expected the user's")
    return Conversation(messages, pictures)


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(message["role"] for message in messages) or "none"


def _message(given: Any, number: int, pictures: list[Any]) -> Message:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise Unsound(f'message {number}: expected {{"role", "content"}}, got {short(given)}')
    content = given.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise Unsound(f"message {number}: expected text or parts as content, got {short(content)}")
    made: list[Part] = []
    for part in parts:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            made += split(part["text"])
        elif kind in ("image", "image_url"):
            held = _held(part)
            pictures += [] if held is None else [held]
            made.append({"type": "image"})
        else:
            raise Unsound(f"message {number}: expected a text or an image, got {short(part)}")
    return {"role": given["role"], "content": made}


def _held(part: Mapping[str, Any]) -> Any:
    if part["type"] == "image_url":
        url = part.get("image_url")
        return url.get("url") if isinstance(url, dict) else url
    return next((part[key] for key in GIVEN if part.get(key) is not None), None)


def split(text: str) -> list[Part]:
    """A text at its tags: one image part for each, texts between them as they are."""
    parts: list[Part] = []
    for i, piece in enumerate(text.split(TAG)):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def question(messages: Sequence[Message]) -> str:
    """The user's last message as people read it, without its pictures."""
    texts = [part["text"].strip() for part in _last(messages)["content"] if part["type"] == "text"]
    return " ".join(text for text in texts if text)


def _last(messages: Sequence[Message]) -> Message:
    return next(message for message in reversed(messages) if message["role"] == "user")


def formed(
    messages: Sequence[Message], form: Form, columns: Mapping[str, Any], where: str
) -> list[Message]:
    """With the recipe's template around the last question and its system text before all."""
    made = list(messages)
    if form.template is not None:
        last = _last(made)
        whole = "".join(TAG if p["type"] == "image" else p["text"] for p in last["content"])
        content = split(form.template.around(whole, columns, where))
        made = [{**m, "content": content} if m is last else m for m in made]
    if form.system is not None and not any(m["role"] == "system" for m in made):
        made.insert(0, {"role": "system", "content": [{"type": "text", "text": form.system}]})
    return made


def placed(
    messages: Sequence[Message], own: Sequence[Any], attached: Sequence[Any]
) -> tuple[list[Message], list[Any]]:
    """A picture for every place and a place for every picture. The messages hold their `own`, or
    those `attached` to the row belong to the places in order, or, where there is no place, before
    the user's first text."""
    places = sum(part["type"] == "image" for message in messages for part in message["content"])
    if own and attached:
        raise Unsound(f"expected pictures in the messages ({len(own)}) or beside ({len(attached)})")
    given = list(own or attached)
    if not places and given:
        first = next(message for message in messages if message["role"] == "user")
        content = [*({"type": "image"} for _ in given), *first["content"]]
        return [{**m, "content": content} if m is first else m for m in messages], given
    if places != len(given):
        raise Unsound(f"expected as many pictures as {TAG}, found {len(given)} for {places}")
    return list(messages), given

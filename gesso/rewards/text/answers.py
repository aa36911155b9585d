"""Extracts answers: from a response (tags or a box) and from a column of the data."""

from __future__ import annotations

import re

from gesso.rewards.labels import as_text, describe_columns
from gesso.types import Prompt

TAG = r"^[A-Za-z][\w-]*$"
COLUMN = "answer"


def last_tagged(response: str, tag: str) -> str | None:
    """The content of the last <tag>…</tag>, or None."""
    contents = re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", response, re.DOTALL)
    return contents[-1].strip() if contents else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{…}, with balanced braces, or None."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for end in range(start, len(text)):
        escaped = text[end - 1] == "\\"
        depth += (text[end] == "{" and not escaped) - (text[end] == "}" and not escaped)
        if depth == 0:
            return text[start:end].strip()
    return None


def expected_answer(prompt: Prompt, column: str) -> str | None:
    """The column as text; None if it is absent or empty."""
    value = prompt.columns.get(column)
    if value is None or isinstance(value, bool | list | dict):
        return None
    return as_text(value).strip() or None


def missing_answer(prompt: Prompt, column: str, example: str) -> str:
    """The error for a row without a usable answer."""
    if column in prompt.columns:
        return f'expected a column "{column}" such as {example}, got {prompt.columns[column]!r}'
    return f'expected a column "{column}" such as {example}, got {describe_columns(prompt)}'

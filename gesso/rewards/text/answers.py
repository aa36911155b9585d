"""Reads answers: in a response between tags or in a box, in the data from a column."""

from __future__ import annotations

import re

from gesso.rewards.labels import among_columns, as_text
from gesso.types import Prompt

TAG = r"^[A-Za-z][\w-]*$"
COLUMN = "answer"


def last_tagged(response: str, tag: str) -> str | None:
    """The content of the last <tag>…</tag>; None where there is none."""
    contents = re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", response, re.DOTALL)
    return contents[-1].strip() if contents else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{…}, with balanced braces; None where there is none."""
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
    """The column as text; None where it is absent or empty."""
    value = prompt.columns.get(column)
    if value is None or isinstance(value, bool | list | dict):
        return None
    return as_text(value).strip() or None


def missing_answer(prompt: Prompt, column: str, example: str) -> str:
    """The error for a row without a usable answer."""
    if column in prompt.columns:
        return f'expected a column "{column}" such as {example}, found {prompt.columns[column]!r}'
    others = among_columns(prompt)
    return f'expected a column "{column}" such as {example}, found no such column{others}'

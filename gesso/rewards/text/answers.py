"""Where an answer stands: in the reply between tags or in a box, in the data in a column."""

from __future__ import annotations

import re
from typing import Any

from gesso.types import Prompt

TAG = r"^[A-Za-z][\w-]*$"
COLUMN = "answer"
LABELS = ("answer", "target", "label", "ground_truth", "solution")
"""Columns that hold a row's answer, in this order, for rewards that do not name one."""


def tagged(reply: str, tag: str) -> str | None:
    """What the last <tag>…</tag> holds; None where there is none."""
    found = re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", reply, re.DOTALL)
    return found[-1].strip() if found else None


def boxed(text: str) -> str | None:
    r"""What the last \boxed{…} holds, braces inside it counted; None where there is none."""
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


def wanted(prompt: Prompt, column: str) -> str | None:
    """That column as text; None where it is absent or empty."""
    given = prompt.columns.get(column)
    if given is None or isinstance(given, bool | list | dict):
        return None
    return as_text(given).strip() or None


def as_text(given: str | int | float) -> str:
    whole = isinstance(given, float) and given.is_integer()
    return str(int(given) if whole else given)  # a column of numbers with gaps comes as floats


def label(prompt: Prompt) -> Any:
    """The row's answer, as its column has it; None where there is none."""
    found = (prompt.columns.get(name) for name in LABELS)
    return next((value for value in found if value is not None), None)


def no_label(prompt: Prompt) -> str:
    """The sentence for a row without one."""
    others = f" among {', '.join(prompt.columns)}" if prompt.columns else ""
    *most, last = LABELS
    return f"expected a column {', '.join(most)} or {last}, found no such column{others}"


def missing(prompt: Prompt, column: str, example: str) -> str:
    """The sentence for a row whose answer does not do."""
    if column in prompt.columns:
        return f'expected a column "{column}" such as {example}, found {prompt.columns[column]!r}'
    others = f" among {', '.join(prompt.columns)}" if prompt.columns else ""
    return f'expected a column "{column}" such as {example}, found no such column{others}'

"""The label of a row: the answer in its data, for styles and protocols that pass one on."""

from __future__ import annotations

from typing import Any

from gesso.types import Prompt

LABEL_COLUMNS = ("answer", "target", "label", "ground_truth", "solution")
"""Columns that may hold the answer, by precedence, for rewards that do not name one."""


def label_of(prompt: Prompt) -> Any:
    """The row's answer, with the type it has in the data; None where there is none."""
    values = (prompt.columns.get(name) for name in LABEL_COLUMNS)
    return next((value for value in values if value is not None), None)


def missing_label(prompt: Prompt) -> str:
    """The error for a row without a label."""
    *most, last = LABEL_COLUMNS
    columns = f"expected a column {', '.join(most)} or {last}"
    return f"{columns}, found no such column{among_columns(prompt)}"


def among_columns(prompt: Prompt) -> str:
    """The columns that the row does have, for an error about one that it lacks."""
    return f" among {', '.join(prompt.columns)}" if prompt.columns else ""


def as_text(value: str | int | float) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value) if whole else value)  # a column of numbers with gaps is read as floats

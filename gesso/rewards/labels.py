"""The label of a row: the answer in its data, for styles and protocols that pass a label."""

from __future__ import annotations

from typing import Any

from gesso.types import Prompt

LABEL_COLUMNS = ("answer", "target", "label", "ground_truth", "solution")
"""Columns that may contain the answer, by precedence, for rewards without a `column` option."""


def label_of(prompt: Prompt) -> Any:
    """The row's answer, with its type in the data, or None."""
    values = (prompt.columns.get(name) for name in LABEL_COLUMNS)
    return next((value for value in values if value is not None), None)


def missing_label(prompt: Prompt) -> str:
    """The error for a row without a label."""
    *most, last = LABEL_COLUMNS
    return f"expected a column {', '.join(most)} or {last}, got {describe_columns(prompt)}"


def describe_columns(prompt: Prompt) -> str:
    """The columns of the row, for an error about a missing column."""
    return f"only {', '.join(prompt.columns)}" if prompt.columns else "no columns"


def as_text(value: str | int | float) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value) if whole else value)  # a number column with gaps is read as floats

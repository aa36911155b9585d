"""Values from a run's files: rows of a .jsonl, the series of a key, ticks of an axis."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Row = Mapping[str, Any]
Points = list[tuple[int, float]]  # (step, value)
T = TypeVar("T")


def series(rows: Sequence[Row], key: str) -> Points:
    """(step, value) of every row with a finite value of `key`."""
    points = [(row["step"], row[key]) for row in rows if key in row]
    return [(s, v) for s, v in points if isinstance(v, (int, float)) and math.isfinite(v)]


def ticks(low: float, high: float, parts: int) -> list[float]:
    """Round values that cover low … high, at least two; starting at 0 if that adds little space."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (0.0, 1.0)
    elif 0 < low < high / 2:
        low = 0.0
    base = 10.0 ** math.floor(math.log10((high - low) / parts))
    step = next(m * base for m in (1, 2, 5, 10, 20) if m * base * parts >= (high - low) * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def parsed(text: bytes) -> dict[str, Any]:
    """Parses a JSON object, or raises a ValueError that describes what was found instead. An
    integer that exceeds the range of a float becomes infinity."""
    if not text.strip():
        raise ValueError("missing or empty")
    try:
        value = json.loads(text.decode("utf-8"), parse_int=_whole)
    except UnicodeDecodeError:
        raise ValueError("not valid UTF-8") from None
    except (ValueError, RecursionError):  # the latter for deeply nested brackets
        raise ValueError("not valid JSON") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {short(value)}")
    return value


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) < 300 else math.inf


def short(value: Any) -> str:
    """A value for a message, on one line and of limited length."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def lines(file: Path, parse: Callable[[Row], T | None], damaged: list[str]) -> list[T]:
    """The complete rows of a .jsonl; rows that `parse` rejects are reported in `damaged`."""
    rows = []
    for number, line in enumerate(file.read_bytes().splitlines(True) if file.is_file() else [], 1):
        try:
            row = parse(parsed(line)) if line.endswith(b"\n") else None
        except ValueError:
            row = None
        if row is None:
            damaged.append(f"{file.name}, line {number}: incomplete or damaged, skipped")
        else:
            rows.append(row)
    return rows

"""A timeline in the trace event format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gesso.timeline.steps import Step

STEPS = "steps"


def trace(steps: Sequence[Step]) -> dict[str, Any]:
    """Times are in µs. Each row is a thread of one process."""
    names = list(dict.fromkeys([STEPS, *(row for step in steps for row in step.spans)]))
    events: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        about = {"ph": "M", "pid": 0, "tid": number}
        events.append({**about, "name": "thread_name", "args": {"name": name}})
        events.append({**about, "name": "thread_sort_index", "args": {"sort_index": number}})
    for step in steps:
        events.append(_event(f"step {step.step}", 0, step.at, step.seconds, step.step))
        for row, spans in step.spans.items():
            for phase, start, end in spans:
                number = names.index(row)
                events.append(_event(phase, number, step.at + start, end - start, step.step))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(name: str, row: int, at: float, seconds: float, step: int) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": 0,
        "tid": row,
        "ts": round(1e6 * at, 1),
        "dur": round(1e6 * seconds, 1),
        "args": {"step": step},
    }

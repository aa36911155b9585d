"""The timeline of a run for the page and for `gesso timeline`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gesso.timeline import advice
from gesso.timeline.steps import Step
from gesso.track.timeline_file import parsed
from gesso.viewer.files import NotShown
from gesso.viewer.reading import RunReader

PHASES = (
    "encode", "sample", "decode", "score", "exchange", "describe", "update", "publish", "wait",
    "evaluate", "save", "report", "other",
)  # fmt: skip


def steps_of(reader: RunReader) -> list[Step]:
    return parsed(reader.text("timeline.jsonl").encode().splitlines())


def summary(steps: Sequence[Step]) -> dict[str, Any]:
    """Shares of the time of each row, what to change, and the numbers of the steps."""
    found = advice.summary(steps)
    rows = [{"name": r.name, "shares": r.shares, "idle": r.idle} for r in found.rows]
    numbers = [step.step for step in steps]
    return {"steps": numbers, "of": found.steps, "rows": rows, "sentence": found.sentence}


def step(steps: Sequence[Step], number: int) -> dict[str, Any]:
    for found in steps:
        if found.step == number:
            return found.line
    raise NotShown(f"the timeline has no step {number}")


def table(found: advice.Summary) -> str:
    """Shares in percent, a line for every row."""
    shown = [p for p in PHASES if any(row.shares.get(p, 0.0) >= 0.005 for row in found.rows)]
    width = max(len(row.name) for row in found.rows)
    lines = [f"{'%':<{width}}  {'idle':>8}" + "".join(f"  {phase:>8}" for phase in shown)]
    for row in found.rows:
        values = [row.idle, *(row.shares.get(phase, 0.0) for phase in shown)]
        lines.append(f"{row.name:<{width}}" + "".join(f"  {100 * v:>8.0f}" for v in values))
    return "\n".join(lines)

"""The timeline of a run, step by step: a line of timeline.jsonl each.

{"step": 3, "at": 12.5, "seconds": 2.1, "busy": {"worker 0": {"sample": 1.2}},
 "spans": {"worker 0": [["sample", 0.0, 1.2]]}}

`at` counts from the start of the run, spans from the start of the step. `busy` is exact; spans are
joined if there are too many to draw.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from gesso.timeline.recorder import Span, joined

DRAWN = 4_000  # maximum number of spans per step
OF_A_ROW = 20  # spans of a row that are always kept

Drawn = list[tuple[str, float, float]]


@dataclass(frozen=True)
class Step:
    step: int
    at: float
    seconds: float
    busy: Mapping[str, Mapping[str, float]]  # row → phase → seconds
    spans: Mapping[str, Drawn]

    @staticmethod
    def of(step: int, at: float, start: float, end: float, spans: Iterable[Span]) -> Step:
        by_row: dict[str, list[Span]] = defaultdict(list)
        for span in spans:
            by_row[span.row].append(span)
        rows = {row: _without_overlap(by_row[row]) for row in sorted(by_row, key=_order)}
        most = max(OF_A_ROW, DRAWN // max(1, len(rows)))
        busy = {row: _busy(found) for row, found in rows.items()}
        drawn = {row: _drawn(found, most, start) for row, found in rows.items()}
        return Step(step, round(at, 4), round(end - start, 4), busy, drawn)

    @staticmethod
    def read(line: Mapping[str, Any]) -> Step:
        """Raises a ValueError, KeyError or TypeError for anything else."""
        busy = {
            str(row): {str(phase): float(value) for phase, value in phases.items()}
            for row, phases in dict(line["busy"]).items()
        }
        spans = {
            str(row): [(str(phase), float(start), float(end)) for phase, start, end in found]
            for row, found in dict(line["spans"]).items()
        }
        return Step(int(line["step"]), float(line["at"]), float(line["seconds"]), busy, spans)

    @property
    def line(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "at": self.at,
            "seconds": self.seconds,
            "busy": self.busy,
            "spans": self.spans,
        }


def _order(row: str) -> tuple[int, str, int]:
    """Workers by number, then the driver and the rewards."""
    name, _, number = row.partition(" ")
    return (0, name, int(number)) if number.isdigit() else (1, name, 0)


def _without_overlap(spans: Sequence[Span]) -> list[Span]:
    """Sorted spans without overlap: where calls of rewards overlap, the earlier one counts."""
    found: list[Span] = []
    end = float("-inf")
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        if span.end > end:
            found.append(span._replace(start=max(span.start, end)))
            end = span.end
    return found


def _busy(spans: Sequence[Span]) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for span in spans:
        seconds[span.phase] += span.end - span.start
    return {phase: round(value, 4) for phase, value in seconds.items()}


def _drawn(spans: list[Span], most: int, start: float) -> Drawn:
    resolution = 1e-3
    found = joined(spans, resolution)
    while len(found) > most:
        resolution *= 2
        slots = groupby(found, partial(_slot, resolution=resolution))
        found = joined([_longest(list(near)) for _, near in slots], resolution)
    return [(s.phase, round(s.start - start, 4), round(s.end - start, 4)) for s in found]


def _slot(span: Span, resolution: float) -> float:
    return span.end // resolution


def _longest(near: Sequence[Span]) -> Span:
    """Merges adjacent spans into one with the phase that takes most of their time."""
    busy = _busy(near)
    return near[0]._replace(phase=max(busy, key=lambda p: busy[p]), end=near[-1].end)

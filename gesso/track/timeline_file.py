"""timeline.jsonl of a run folder: the newest steps (`gesso/timeline/steps.py`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from gesso.timeline.steps import Step
from gesso.track.atomic import write_atomic

KEPT = 200  # steps
BYTES = 8 * 2**20  # the file is shortened to half of it


class TimelineFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = -1  # unknown

    def append(self, step: Step) -> None:
        """The oldest steps are dropped now and then, so that the file stays small."""
        line = json.dumps(step.line, separators=(",", ":")).encode() + b"\n"
        with self.path.open("ab") as file:
            file.write(line)
            size = file.tell()
        self._lines = len(self._read()) if self._lines < 0 else self._lines + 1
        if self._lines >= 2 * KEPT or size > BYTES:
            kept = self._read()[-KEPT:]
            while len(kept) > 1 and sum(map(len, kept)) > BYTES // 2:
                kept = kept[-(len(kept) // 2) :]
            write_atomic(self.path, b"".join(kept))
            self._lines = len(kept)

    @property
    def end(self) -> float:
        """Seconds from the start of the run to the end of the newest step."""
        steps = self.read()
        return steps[-1].at + steps[-1].seconds if steps else 0.0

    def rewind(self, step: int | None) -> None:
        """Drops what follows `step`; None: everything."""
        if self.path.is_file():
            kept = [] if step is None else [s for s in self.read() if s.step <= step]
            lines = [json.dumps(s.line, separators=(",", ":")).encode() + b"\n" for s in kept]
            write_atomic(self.path, b"".join(lines))
            self._lines = len(lines)

    def read(self) -> list[Step]:
        return parsed(self._read())

    def _read(self) -> list[bytes]:
        try:
            lines = self.path.read_bytes().splitlines(keepends=True)
        except OSError:
            return []
        return [line for line in lines if line.endswith(b"\n")]


def parsed(lines: Sequence[bytes]) -> list[Step]:
    """Steps in order; damaged lines are skipped."""
    found: dict[int, Step] = {}
    for line in lines:
        try:
            step = Step.read(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            continue
        found[step.step] = step
    return [found[step] for step in sorted(found)]

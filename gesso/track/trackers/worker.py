"""A tracker in its own process, started by `imports.command`.

Lines of JSON come in on stdin and go out on stdout. The first says what to track; then "news" (the
run folder has a new row), "finish" or "fail". When stdin closes without either, because the run was
killed, the tracker is finished as failed. What the tracker prints goes to stderr, a log file.

`trackers/NAME.json` in the run folder remembers the tracker's own id of the run and the last step
that it has: a resumed run goes on with both, and what a tracker missed it gets then.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from gesso import imports
from gesso.config import Tracker as Settings
from gesso.track import older_names
from gesso.track.older_names import renamed
from gesso.track.trackers.base import (
    Batched,
    Logged,
    Setup,
    Tracker,
    figures_of,
    file_name,
    samples_of,
)

Answer = Callable[[Mapping[str, Any]], None]
ROWS = 32  # in a batch, at most


class TrackerState:
    """What a tracker has of a run, on disk."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.id: str | None = None
        self.step = -1  # the last that it has
        if file.is_file():
            known = json.loads(file.read_text("utf-8"))
            self.id, self.step = known["id"], known["step"]

    def keep(self) -> None:
        aside = self.file.with_name(f".{self.file.name}.new")
        aside.write_text(json.dumps({"id": self.id, "step": self.step}), "utf-8")
        os.replace(aside, self.file)


class Tail:
    """The rows of metrics.jsonl as they come, each once; a half-written one waits."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.at = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        if not self.file.is_file():
            return
        with self.file.open("rb") as file:
            file.seek(self.at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.at += len(line)
                yield renamed(json.loads(line), older_names.METRICS)


def track(order: Mapping[str, Any], commands: Iterator[str], answer: Answer) -> None:
    """Make the tracker, bring it up to date at every command, and finish it."""
    run, name = Path(order["run"]), order["name"]
    settings = Settings(**order["settings"])
    place = Path(settings.dir) if settings.dir else run / "trackers"
    folder = place / file_name(name)
    folder.mkdir(parents=True, exist_ok=True)
    state = TrackerState(run / "trackers" / f"{file_name(name)}.json")
    title = settings.name or run.resolve().name
    setup = Setup(run, folder, title, order["config"], settings, state.id)
    tracker: Tracker | Batched = imports.load(order["reference"], "tracker")(setup)
    state.id = tracker.id
    state.keep()
    answer({"where": tracker.where})
    tail = Tail(run / "metrics.jsonl")
    for command in commands:
        new = (row for row in tail.rows() if row["step"] > state.step)
        for rows in batches(run, new, ROWS if isinstance(tracker, Batched) else 1):
            if isinstance(tracker, Batched):
                tracker.log_rows(rows)
            else:
                tracker.log(rows[0].step, rows[0].figures, rows[0].samples)
            state.step = rows[-1].step
            state.keep()
            answer({"step": state.step})
        if command == "news":
            answer({"idle": True})
    tracker.finish(command == "finish")
    answer({"done": True})


def batches(run: Path, rows: Iterable[Mapping[str, Any]], most: int) -> Iterator[list[Logged]]:
    """So many rows together, and none after one with samples: those may take long by themselves,
    and an answer is awaited after each batch."""
    batch: list[Logged] = []
    for row in rows:
        batch.append(Logged(row["step"], figures_of(row), samples_of(run, row["step"])))
        if len(batch) == most or batch[-1].samples:
            yield batch
            batch = []
    if batch:
        yield batch


def heard(lines: TextIO, patience: float) -> Iterator[str]:
    """Commands, read on a thread of their own until "finish" or "fail". When they end without
    either, the run was killed: a tracker that hangs must not stay behind for ever."""
    commands: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in lines:
            commands.put(json.loads(line))
        commands.put("fail")
        time.sleep(patience)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    while (command := commands.get()) == "news":
        yield command
    yield command


def main() -> None:
    lines = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # nobody is there to be asked for a key
    os.dup2(2, 1)

    def answer(message: Mapping[str, Any]) -> None:
        with suppress(BrokenPipeError):  # the run was killed: what is heard next is its end
            answers.write(json.dumps(message) + "\n")
            answers.flush()

    try:
        order = json.loads(lines.readline())
        track(order, heard(lines, order["settings"]["patience"]), answer)
    except BaseException as error:  # whatever a package raises: the run must hear of it
        answer({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()

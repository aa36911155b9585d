"""A tracker in a separate process, started by `imports.command`.

It receives lines of JSON on stdin and sends lines on stdout. The first line describes what to
track; then follow "news" (the run folder has a new row), "finish" or "fail". If stdin closes
without either, because the run was killed, the tracker is finished as failed. Output of the tracker
goes to stderr, a log file.

`trackers/NAME.json` in the run folder stores the tracker's id of the run and the last logged step:
a resumed run continues from both, and logs the rows that the tracker missed.
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
ROWS = 32  # maximum number of rows in a batch


class TrackerState:
    """The state of a tracker for a run, on disk."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.id: str | None = None
        self.step = -1  # last logged step
        if file.is_file():
            saved = json.loads(file.read_text("utf-8"))
            self.id, self.step = saved["id"], saved["step"]

    def save(self) -> None:
        temporary = self.file.with_name(f".{self.file.name}.new")
        temporary.write_text(json.dumps({"id": self.id, "step": self.step}), "utf-8")
        os.replace(temporary, self.file)


class Tail:
    """The new rows of metrics.jsonl, each once; an incomplete line is read later."""

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
    """Creates the tracker, logs new rows at every command, and finishes it."""
    run, name = Path(order["run"]), order["name"]
    settings = Settings(**order["settings"])
    parent = Path(settings.dir) if settings.dir else run / "trackers"
    folder = parent / file_name(name)
    folder.mkdir(parents=True, exist_ok=True)
    state = TrackerState(run / "trackers" / f"{file_name(name)}.json")
    title = settings.name or run.resolve().name
    setup = Setup(run, folder, title, order["config"], settings, state.id)
    tracker: Tracker | Batched = imports.load(order["reference"], "tracker")(setup)
    state.id = tracker.id
    state.save()
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
            state.save()
            answer({"step": state.step})
        if command == "news":
            answer({"idle": True})
    tracker.finish(command == "finish")
    answer({"done": True})


def batches(run: Path, rows: Iterable[Mapping[str, Any]], most: int) -> Iterator[list[Logged]]:
    """Batches of at most `most` rows. A row with samples ends its batch: it may take long, and the
    run expects a response after each batch."""
    batch: list[Logged] = []
    for row in rows:
        batch.append(Logged(row["step"], figures_of(row), samples_of(run, row["step"])))
        if len(batch) == most or batch[-1].samples:
            yield batch
            batch = []
    if batch:
        yield batch


def commands_from(lines: TextIO, patience: float) -> Iterator[str]:
    """Commands up to "finish" or "fail", read on a separate thread. If the lines end without
    either, the run was killed: the process then exits after `patience` seconds, even if the tracker
    hangs."""
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
    os.dup2(nothing, 0)  # there is no user to prompt for an API key
    os.dup2(2, 1)

    def answer(message: Mapping[str, Any]) -> None:
        with suppress(BrokenPipeError):  # the run was killed: the next command will be "fail"
            answers.write(json.dumps(message) + "\n")
            answers.flush()

    try:
        order = json.loads(lines.readline())
        track(order, commands_from(lines, order["settings"]["patience"]), answer)
    except BaseException as error:  # packages may raise anything; the run must be notified
        answer({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()

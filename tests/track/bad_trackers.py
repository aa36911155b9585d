"""Trackers that fail, and two that write down what they are told."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence

from gesso.track.samples import Shown
from gesso.track.trackers.base import Logged, Setup


class Records:
    """Into `told.jsonl` in its folder, one line a call."""

    def __init__(self, setup: Setup) -> None:
        self.file = setup.folder / "told.jsonl"
        self.id, self.where = setup.id or "first", str(setup.folder)
        self._tell("start", setup.id)

    def log(self, step: int, figures: Mapping[str, float], samples: Sequence[Shown]) -> None:
        self._tell("log", step, dict(figures), len(samples))

    def finish(self, ok: bool) -> None:
        self._tell("finish", ok)

    def _tell(self, *what: object) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps([os.getpid(), *what]) + "\n")


class RecordsRows:
    """As Records, but several rows in a call."""

    def __init__(self, setup: Setup) -> None:
        self.file = setup.folder / "told.jsonl"
        self.id, self.where = "first", str(setup.folder)

    def log_rows(self, rows: Sequence[Logged]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps([[row.step, len(row.samples)] for row in rows]) + "\n")

    def finish(self, ok: bool) -> None: ...


class FailsAtStart(Records):
    def __init__(self, setup: Setup) -> None:
        raise ConnectionError("no route\nto host")


class FailsInLog(Records):
    def log(self, step: int, figures: Mapping[str, float], samples: Sequence[Shown]) -> None:
        super().log(step, figures, samples)
        if step == 1:
            raise RuntimeError("quota exceeded")


class FailsAtEnd(Records):
    def finish(self, ok: bool) -> None:
        raise OSError("disk full")


class Dies(Records):
    def log(self, step: int, figures: Mapping[str, float], samples: Sequence[Shown]) -> None:
        os._exit(7)


class Asks(Records):
    """As a package without a key does."""

    def __init__(self, setup: Setup) -> None:
        print("shouting")
        self.key = input("your key? ")


class HangsAtStart(Records):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        time.sleep(600)


class HangsInLog(Records):
    def log(self, step: int, figures: Mapping[str, float], samples: Sequence[Shown]) -> None:
        super().log(step, figures, samples)
        time.sleep(600)


class HangsAtEnd(Records):
    def finish(self, ok: bool) -> None:
        super().finish(ok)
        time.sleep(600)

"""Progress of a run in the terminal: a live table, or one plain line a step where there is none."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import rich.console
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

RECENT = 10  # rows whose mean time/step gives the time left
HISTORY = 32  # rewards in the sparkline
BARS = "▁▂▃▄▅▆▇█"


class Console:
    """`start`, then for each step some `phase`s and a `row`, at last `stop`."""

    def __init__(self, total: int, out: rich.console.Console | None = None) -> None:
        self.total = total
        self.out = out if out is not None else rich.console.Console()
        self.step = 0
        self.last: Mapping[str, Any] = {}
        self.held_out: list[float] = []  # the first and the latest
        self.rewards: deque[float] = deque(maxlen=HISTORY)
        self.times: deque[float] = deque(maxlen=RECENT)
        self.doing = _Phase("starting", time.monotonic())
        self.live: Live | None = None

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, step: int) -> None:
        """Begin, or go on after `step` steps."""
        self.step = step
        can_draw = self.out.is_terminal and not self.out.is_dumb_terminal
        if can_draw and self.out.encoding.startswith("utf") and self.live is None:
            self.live = Live(self._view(), console=self.out, refresh_per_second=4)
            self.live.start()

    def phase(self, text: str) -> None:
        """What is being done from now on."""
        self.doing = _Phase(text, time.monotonic())
        self._draw()

    def row(self, row: Mapping[str, Any]) -> None:
        """A metrics row; row 0 is the evaluation before training."""
        row = self.last = {key: value for key, value in row.items() if value is not None}
        self.step = row["step"]
        key = held_out_key(row)
        if key in row:
            self.held_out = [*self.held_out[:1], row[key]]
        if "reward" in row:
            self.rewards.append(row["reward"])
        if "time/step" in row and self.step > 0:
            self.times.append(row["time/step"])
        if self.live is None:
            self._print("  ".join([f"step {self.step}/{self.total}", *self._figures(row)]))
        self._draw()

    def note(self, text: str) -> None:
        """Stays above the live display."""
        self._print(text)

    def stop(self) -> None:
        """Leave the last figures, and the terminal as it was; a second call does nothing."""
        if self.live is None:
            return
        done = self.step >= self.total
        self.live.update(self._view("done" if done else f"stopped after step {self.step}"))
        live, self.live = self.live, None
        live.stop()

    @property
    def left(self) -> float | None:
        """Seconds to go by the mean of the last rows; None before the first and at the end."""
        if not self.times or self.step >= self.total:
            return None
        return sum(self.times) / len(self.times) * (self.total - self.step)

    def _figures(self, row: Mapping[str, Any]) -> list[str]:
        """What a plain line says of a row; what the row lacks is left out."""
        key = held_out_key(row)
        named = [("reward", "reward"), (key, "held-out")]
        figures = [f"{name} {short(row[key])}" for key, name in named if key in row]
        figures += [*_update(row), *_replies(row), *_speed(row), *_health(row)]
        return figures + ([f"{clock(self.left)} left"] if self.left is not None else [])

    def _print(self, text: str) -> None:
        """As it is: no markup, no wrapping, and nothing that a terminal would obey."""
        safe = "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)
        safe = safe.encode(self.out.encoding, "replace").decode(self.out.encoding)
        self.out.print(Text(safe), soft_wrap=True)

    def _draw(self) -> None:
        if self.live is not None:
            self.live.update(self._view())

    def _view(self, end: str = "") -> RenderableType:
        """Built anew at each change, so that the drawing thread never sees half a change."""
        bar = Table.grid(padding=(0, 2))
        left = f"{clock(self.left)} left" if self.left is not None and not end else ""
        where = f"step {self.step}/{self.total}"
        bar.add_row(where, ProgressBar(max(self.total, 1), self.step, width=24), left)
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        if self.rewards:
            table.add_row("reward", f"{short(self.rewards[-1])}  {sparkline(self.rewards)}")
        if self.held_out:
            table.add_row("held-out", " → ".join(short(value) for value in self.held_out))
        if _update(self.last):
            table.add_row("update", "  ".join(_update(self.last)))
        if _replies(self.last):
            table.add_row("replies", "  ".join(_replies(self.last)))
        if _speed(self.last):
            table.add_row("speed", "  ".join([*_speed(self.last), *_tokens(self.last)]))
        if _health(self.last):
            table.add_row("health", *_health(self.last))
        return Group(bar, table, Text(end) if end else Spinner("dots", self.doing))


@dataclass(frozen=True)
class _Phase:
    """A phase and how long it has gone on, at the time of drawing."""

    text: str
    since: float

    def __rich__(self) -> Text:
        return Text(f"{self.text} {clock(time.monotonic() - self.since)}")


def held_out_key(keys: Iterable[str]) -> str:
    """The figure a run is judged by: the share of exact answers where there is one."""
    exact = sorted(key for key in keys if key.startswith("eval/") and key.endswith("/exact"))
    return exact[0] if exact else "eval/reward"


def clock(seconds: float) -> str:
    """2:10, or 1:02:10 from an hour up."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def short(value: float) -> str:
    """.62, -.30, 1.00"""
    return f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 0.995 else f"{value:.2f}"


def sparkline(values: Sequence[float]) -> str:
    """One block a value, from the least to the greatest; a blank for one that is no number."""
    finite = [v for v in values if math.isfinite(v)] or [0.0]
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    top = len(BARS) - 1
    return "".join(BARS[round((v - low) / span * top)] if math.isfinite(v) else " " for v in values)


def _update(row: Mapping[str, Any]) -> list[str]:
    shown = {"ratio": "{:.4f}".format, "clipped": short, "drift": "{:.3g}".format, "entropy": short}
    figures = [
        f"{k} {form(row[f'update/{k}'])}" for k, form in shown.items() if f"update/{k}" in row
    ]
    return figures + (["update skipped"] if row.get("update/skipped") else [])


def _replies(row: Mapping[str, Any]) -> list[str]:
    """Of a model that writes: tokens of the mean reply, and the share that ran into the limit."""
    figures = [f"length {row['reply/length']:.0f}"] if "reply/length" in row else []
    return figures + ([f"cut {short(row['reply/cut'])}"] if row.get("reply/cut") else [])


def _tokens(row: Mapping[str, Any]) -> list[str]:
    if "samples_per_s" not in row or "reply/length" not in row:
        return []
    return [f"{row['samples_per_s'] * row['reply/length']:.0f} tokens/s"]


def _speed(row: Mapping[str, Any]) -> list[str]:
    figures = [f"{row['samples_per_s']:.1f} samples/s"] if "samples_per_s" in row else []
    return figures + ([f"{row['failed']:g} failed"] if row.get("failed") else [])


def _health(row: Mapping[str, Any]) -> list[str]:
    """Warnings that hold; what they mean was told in a note, and docs/health.md has it."""
    return [f"! {', '.join(row['health'])}"] if row.get("health") else []

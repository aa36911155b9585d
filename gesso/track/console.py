"""Progress in the terminal: a live display, or plain lines if the output is not a terminal."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import rich.console
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from gesso.track.progress import Clock

RECENT = 10  # rows whose mean time/step estimates the remaining time
HISTORY = 32  # rewards in the sparkline
BARS = "▁▂▃▄▅▆▇█"
REPORT_AFTER = 5.0  # seconds until a plain line reports a phase, and minimum between such lines
MAX_PAUSE = 30.0  # maximum seconds between such lines


class Console:
    """Call order: any number of `phase`s; for a run `start`, then per step some `phase`s and a
    `row`; finally `stop`. A terminal shows phases live; otherwise a line reports long phases."""

    def __init__(self, out: rich.console.Console | None = None, aside: bool = False) -> None:
        self.out = out if out is not None else rich.console.Console(stderr=aside)
        self.total: int | None = None  # steps of the run; None: not a run
        self.step = 0
        self.last: Mapping[str, Any] = {}
        self.held_out: list[float] = []  # the first and the latest value
        self.rewards: deque[float] = deque(maxlen=HISTORY)
        self.times: deque[float] = deque(maxlen=RECENT)
        self.doing: Clock | None = None
        self.live: Live | None = None
        self._reported = 0.0  # time of the last line about the phase
        self._ticker: _Ticker | None = None
        self._lock = threading.RLock()  # reentrant: Ctrl-C may print a note at any point

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, step: int, total: int) -> None:
        """A run starts, or resumes after `step` steps."""
        self.step, self.total = step, total
        self._begin()
        self._draw()

    def phase(self, text: str, total: int = 0) -> None:
        """Starts a phase."""
        with self._lock:
            self.doing, self._reported = Clock(text, total), time.monotonic()
        self._begin()
        self._draw()

    def advance(self, done: int = 1) -> None:
        """Shown at the next refresh or in the next line."""
        with self._lock:
            if self.doing is not None:
                self.doing.done += done

    def result(self, text: str, data: Mapping[str, Any]) -> None:
        """Printed to stdout, even if the display is on stderr."""
        self.stop()
        print(text, flush=True)

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
        """Printed permanently above the live display."""
        self._print(text)

    def stop(self) -> None:
        """Prints the final values of a run and restores the terminal; may be called twice."""
        if self._ticker is not None:
            self._ticker.stop()
            self._ticker = None
        if self.live is None:
            return
        live, self.live = self.live, None
        live.stop()  # erases the live display
        if self.total is not None:
            done = self.step >= self.total
            self.out.print(self._view("done" if done else f"stopped after step {self.step}"))

    def _begin(self) -> None:
        """Starts a live display if possible, otherwise a thread that reports long phases."""
        if self.live is not None or self._ticker is not None:
            return
        can_draw = self.out.is_terminal and not self.out.is_dumb_terminal
        if can_draw and self.out.encoding.startswith("utf"):
            self.live = Live(self._view(), console=self.out, refresh_per_second=4, transient=True)
            self.live.start()
        else:
            self._ticker = _Ticker(self)

    def report(self) -> None:
        """Prints a line about the phase if one is due."""
        with self._lock:
            doing, now = self.doing, time.monotonic()
            if doing is None:
                return
            pause = min(MAX_PAUSE, max(REPORT_AFTER, doing.seconds / 6))
            if now - self._reported < pause:
                return
            self._reported = now
        self._print(f"{doing.text} {how_far(doing)}")

    @property
    def left(self) -> float | None:
        """Estimated remaining seconds, from the mean of the last rows; None before the first row
        and at the end."""
        if not self.times or self.total is None or self.step >= self.total:
            return None
        return sum(self.times) / len(self.times) * (self.total - self.step)

    def _figures(self, row: Mapping[str, Any]) -> list[str]:
        """The values of a row for a plain line; missing values are omitted."""
        key = held_out_key(row)
        named = [("reward", "reward"), (key, "held-out")]
        figures = [f"{name} {short(row[key])}" for key, name in named if key in row]
        figures += [*_update(row), *_responses(row), *_speed(row), *_health(row)]
        return figures + ([f"{clock(self.left)} left"] if self.left is not None else [])

    def _print(self, text: str) -> None:
        """Prints verbatim: no markup, no wrapping, no control characters."""
        safe = "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)
        safe = safe.encode(self.out.encoding, "replace").decode(self.out.encoding)
        self.out.print(Text(safe), soft_wrap=True)

    def _draw(self) -> None:
        if self.live is not None:
            self.live.update(self._view())

    def _view(self, end: str = "") -> RenderableType:
        """Rebuilt at each change, so that the rendering thread never sees a partial update."""
        doing = Text(end) if end else _Doing(self.doing) if self.doing else Text("")
        if self.total is None:
            return doing
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
        if _responses(self.last):
            table.add_row("responses", "  ".join(_responses(self.last)))
        if _speed(self.last):
            table.add_row("speed", "  ".join([*_speed(self.last), *_tokens(self.last)]))
        if _health(self.last):
            table.add_row("health", *_health(self.last))
        return Group(bar, table, doing)


class _Doing:
    """A phase at render time: text, progress and remaining time."""

    def __init__(self, doing: Clock) -> None:
        self.doing = doing
        self.spinner = Spinner("dots")

    def __rich__(self) -> RenderableType:
        line = Table.grid(padding=(0, 1))
        doing = self.doing
        cells: list[RenderableType] = [self.spinner, Text(doing.text)]
        if doing.total:
            cells.append(ProgressBar(doing.total, min(doing.done, doing.total), width=16))
        line.add_row(*cells, Text(how_far(doing)))
        return line


class _Ticker:
    """A thread that checks once per second whether a line is due."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(1.0):
            self.console.report()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


def how_far(doing: Clock) -> str:
    """`128/320, 0:12 left`; if the total is unknown, the elapsed time."""
    if not doing.total:
        return (
            clock(doing.seconds)
            if not doing.done
            else f"{amount(doing.done)}, {clock(doing.seconds)}"
        )
    share = f"{amount(min(doing.done, doing.total))}/{amount(doing.total)}"
    if doing.left is not None:
        return f"{share}, {clock(doing.left)} left"
    return share if doing.done else f"{share}, {clock(doing.seconds)} so far"


def amount(count: int) -> str:
    """320, 45M, 1.2G: only bytes reach millions."""
    if count < 10**6:
        return str(count)
    return f"{count / 1e6:.0f}M" if count < 10**9 else f"{count / 1e9:.1f}G"


def held_out_key(keys: Iterable[str]) -> str:
    """Key of the main held-out metric: the fraction of exact answers if there is one."""
    exact = sorted(key for key in keys if key.startswith("eval/") and key.endswith("/exact"))
    return exact[0] if exact else "eval/reward"


def clock(seconds: float) -> str:
    """2:10, or 1:02:10 from one hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def short(value: float) -> str:
    """.62, -.30, 1.00"""
    return f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 0.995 else f"{value:.2f}"


def sparkline(values: Sequence[float]) -> str:
    """One block per value, scaled from minimum to maximum; a blank for a non-finite value."""
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


def _responses(row: Mapping[str, Any]) -> list[str]:
    """Language models: mean tokens per response, and the fraction that reached max_tokens."""
    figures = [f"length {row['response/length']:.0f}"] if "response/length" in row else []
    return figures + (
        [f"truncated {short(row['response/truncated'])}"] if row.get("response/truncated") else []
    )


def _tokens(row: Mapping[str, Any]) -> list[str]:
    if "samples_per_s" not in row or "response/length" not in row:
        return []
    return [f"{row['samples_per_s'] * row['response/length']:.0f} tokens/s"]


def _speed(row: Mapping[str, Any]) -> list[str]:
    figures = [f"{row['samples_per_s']:.1f} samples/s"] if "samples_per_s" in row else []
    return figures + ([f"{row['failed']:g} failed"] if row.get("failed") else [])


def _health(row: Mapping[str, Any]) -> list[str]:
    """Names of the active health warnings; a note and docs/reference/health.md explain them."""
    return [f"! {', '.join(row['health'])}"] if row.get("health") else []

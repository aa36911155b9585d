"""A run folder as plain data for JSON: summary, curves, samples and groups.

The folder may be growing, incomplete, damaged or of another version. Unreadable parts are skipped
and reported in `damaged`; no content of a run folder raises an exception here. Metrics are read
incrementally.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from gesso.config import Expect
from gesso.config import family as config_family
from gesso.track import older_names
from gesso.track.console import held_out_key
from gesso.track.figures import lines, series
from gesso.track.older_names import renamed
from gesso.track.run_folder import recipe_name
from gesso.track.samples import Shown
from gesso.viewer.files import NotShown, image_file
from gesso.viewer.status import health, why_stopped
from gesso.viewer.thinning import thin, thinned
from gesso.zoo import limits

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RECENT = 10  # rows whose mean time estimates the remaining time
# A run counts as stopped after this many seconds without a new row,
STILL = 60.0
PATIENCE = 5.0  # or this many times the duration of its steps, whichever is longer
NOTES = 300  # newest lines of log.txt
TRIES = 20  # maximum number of images opened to determine their size

STEP = re.compile(r"[0-9]{6,12}")

Row = dict[str, Any]


class RunReader:
    """Reads one run folder; thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._rows: list[Row] = []
        self._metrics: tuple[int, int] = (0, 0)  # inode of metrics.jsonl, and bytes read of it
        self._bad: list[str] = []
        self._cached: tuple[tuple[int, int], dict[str, Any]] = ((-1, 0), {})  # for _figures
        self._evaluations: dict[Path, tuple[tuple[int, int], list[Shown], list[str]]] = {}

    def rows(self) -> list[Row]:
        """Metrics in the order of their steps; if a step was written twice, the later row."""
        with self._lock:
            self._read_metrics()
            return list(self._rows)

    def _file_of(self, name: str) -> Path | None:
        """A file of this run, or None; links are not followed."""
        path = self.path / name
        steps = [path, *list(path.parents)[: len(Path(name).parts) - 1]]
        return None if any(step.is_symlink() for step in steps) or not path.is_file() else path

    def _read_metrics(self) -> None:
        file = self._file_of("metrics.jsonl")
        if file is None:
            self._rows, self._bad, self._metrics = [], [], (0, 0)
            return
        try:
            self._read_on(file)
        except OSError as error:
            self._bad = [f"metrics.jsonl cannot be read: {error.strerror}"]

    def _read_on(self, file: Path) -> None:
        status = file.stat()
        inode, done = self._metrics
        if status.st_ino != inode or status.st_size < done:  # a resumed run rewrote it
            self._rows, self._bad, done = [], [], 0
        if status.st_size > done:
            with file.open("rb") as opened:
                opened.seek(done)
                data = opened.read()
            whole = data.rfind(b"\n") + 1  # the rest is still being written
            for line in data[:whole].splitlines():
                self._take(line)
            done += whole
        self._metrics = (status.st_ino, done)

    def _take(self, line: bytes) -> None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        step = row.get("step") if isinstance(row, dict) else None
        if not isinstance(step, int) or _absurd(step):
            self._bad.append(f"metrics.jsonl: a damaged line after step {self._newest}, skipped")
            return
        row = renamed(row, older_names.METRICS)
        row = {key: value for key, value in row.items() if not _absurd(value)}
        if row["step"] <= self._newest and self._rows:
            del self._rows[bisect_left([r["step"] for r in self._rows], row["step"]) :]
        self._rows.append(row)

    @property
    def _newest(self) -> int:
        return self._rows[-1]["step"] if self._rows else 0

    def config(self) -> dict[str, Any]:
        try:
            return tomllib.loads(self.text("config.toml"))
        except tomllib.TOMLDecodeError:
            return {}

    def text(self, name: str) -> str:
        file = self._file_of(name)
        try:
            return file.read_text("utf-8", "replace") if file is not None else ""
        except OSError:
            return ""

    def log(self) -> list[str]:
        return self.text("log.txt").splitlines()[-NOTES:]

    def damaged(self) -> list[str]:
        """Messages about unreadable parts."""
        self.rows()
        messages = list(self._bad)
        try:
            tomllib.loads(self.text("config.toml"))
        except tomllib.TOMLDecodeError as error:
            messages.append(f"config.toml cannot be read: {error}")
        for _, _, bad in list(self._evaluations.values()):
            messages += bad
        return messages

    def summary(self, now: float | None = None) -> dict[str, Any]:
        """A row of the table of runs."""
        config, figures, log = self.config(), self._figures(), self.log()
        steps, step, times = _number(config.get("steps")), figures["step"], figures["times"]
        state = self._state(step, steps, times, time.time() if now is None else now)
        reason = why_stopped(log)
        state = "stopped" if reason and state == "running" else state
        return {
            "name": self.path.name,
            "about": str(config.get("about", "")),
            "recipe": recipe_name(self.text("config.toml")),
            "algorithm": _name(config, "algorithm", "name"),
            "model": _name(config, "model", "path"),
            "limits": limits.text_of(_name(config, "model", "path")),
            "family": family(config),
            "frames": _frames(config),
            "seed": _number(config.get("seed")),
            "steps": steps,
            "left": fmean(times) * (steps - step) if times and state == "running" else None,
            "state": state,
            "health": health(figures["health"], log, reason),
            "changed": self._changed(),
            **figures["row"],
        }

    def _figures(self) -> dict[str, Any]:
        """Values from the metrics for the table; recomputed only when the metrics have grown."""
        rows = self.rows()
        if self._cached[0] == self._metrics:
            return self._cached[1]
        stamp = self._metrics
        key = held_out_key(self.keys())
        train, held_out = series(rows, "reward"), series(rows, key)
        speed = series(rows, "samples_per_s")
        step = rows[-1]["step"] if rows else 0
        row = {
            "step": step,
            "reward": train[-1][1] if train else None,
            "best": max((v for _, v in train), default=None),
            "held_out": {
                "key": key,
                "first": held_out[0][1] if held_out else None,
                "now": held_out[-1][1] if held_out else None,
                "best": max((v for _, v in held_out), default=None),
            },
            "samples_per_s": speed[-1][1] if speed else None,
            "seconds": (series(rows, "time/total") or [(0, 0.0)])[-1][1],
            "spark": [round(v, 4) for _, v in thin(train, 40)],
        }
        figures = {
            "row": row,
            "step": step,
            "times": [v for _, v in series(rows[1:], "time/step")][-RECENT:],
            "health": _texts(rows[-1].get("health")) if rows else [],
        }
        self._cached = (stamp, figures)
        return figures

    def _state(self, step: int, steps: int | None, times: Sequence[float], now: float) -> str:
        """The state of a run by its files. A killed run leaves no record, so a run without new rows
        counts as stopped."""
        if steps is None:  # another version, or damaged
            return "unknown"
        if step >= steps:
            return "finished"
        patience = max(STILL, PATIENCE * max(times, default=0.0))
        return "running" if now - self._changed() < patience else "stopped"

    def _changed(self) -> float:
        newest = 0.0
        for name in ("config.toml", "metrics.jsonl", "log.txt"):
            try:
                newest = max(newest, (self.path / name).stat().st_mtime)
            except OSError:
                continue  # does not exist yet
        return newest

    def details(self) -> dict[str, Any]:
        """All data of the run except images and curves."""
        return {
            **self.summary(),
            "keys": self.keys(),
            "group_steps": self.group_steps(),
            "log": self.log(),
            "config": self.text("config.toml"),
            "expect": _expected(self.config().get("expect")),
            "damaged": self.damaged(),
        }

    def curves(self, keys: Sequence[str], points: int) -> dict[str, Any]:
        """Series of these keys with at most `points` points, over steps, samples and seconds."""
        rows = self.rows()
        per_step = _samples_per_step(self.config())
        seconds = dict(series(rows, "time/total"))
        curves = {}
        for key in keys:
            points_of_key = series(rows, key)
            line = thinned(points_of_key, points)
            if line:
                steps = line["step"]
                line["count"] = len(points_of_key)
                line["seconds"] = [seconds.get(s) for s in steps]
                line["samples"] = [s * per_step for s in steps] if per_step else [None] * len(steps)
                curves[key] = line
        return {"series": curves, "step": rows[-1]["step"] if rows else 0}

    def keys(self) -> list[str]:
        """All keys with a number in at least one row."""
        keys: dict[str, None] = {}
        for row in self.rows():
            for key in row.keys() - keys.keys():
                if key != "step" and _number(row[key]) is not None:
                    keys[key] = None
        return sorted(keys)

    def evolution(self) -> dict[str, Any]:
        """The same prompts and seeds at every evaluation: each prompt with a row of cells, one per
        step, null if no sample was saved."""
        evaluations = self._read_evaluations()
        steps = sorted(evaluations)
        prompts: dict[tuple[int, str, int], dict[str, Any]] = {}
        for column, step in enumerate(steps):
            for row in evaluations[step]:
                key = (row.index, row.prompt, row.seed)
                if key not in prompts:
                    prompts[key] = {
                        "index": row.index,
                        "prompt": row.prompt,
                        "seed": str(row.seed),  # may exceed the integer range of JavaScript
                        "answer": row.answer,
                        "shown": [f"samples/{name}" for name in row.shown],
                        "cells": [None] * len(steps),
                    }
                prompts[key]["cells"][column] = _cell(row)
        ordered = [prompts[key] for key in sorted(prompts)]
        return {"steps": steps, "prompts": ordered, "size": self._size(ordered)}

    def _size(self, prompts: Sequence[Row]) -> list[int] | None:
        """Width and height into which the first images of the first prompts fit, so that the page
        can reserve space for all images; with `model.match_input` their sizes differ."""
        from PIL import Image

        images = ([c["image"] for c in p["cells"] if c and "image" in c] for p in prompts)
        names = [name for nth in itertools.zip_longest(*images) for name in nth if name]
        sizes = []
        for name in names[:TRIES]:
            try:
                with Image.open(image_file(self.path, name)) as opened:
                    sizes.append(opened.size)
            except (NotShown, OSError, Image.DecompressionBombError):
                continue  # damaged, missing or too large: try the next
        return [max(sides) for sides in zip(*sizes, strict=True)] or None

    def _read_evaluations(self) -> dict[int, list[Shown]]:
        files = [self._file_of(f"samples/{step:06d}.jsonl") for step in self._steps("samples")]
        with self._lock:
            present = [file for file in files if file is not None]
            for file in present:
                status = file.stat()
                stamp = (status.st_mtime_ns, status.st_size)
                if file not in self._evaluations or self._evaluations[file][0] != stamp:
                    bad: list[str] = []
                    self._evaluations[file] = (stamp, lines(file, Shown.of, bad), bad)
            return {int(file.stem): self._evaluations[file][1] for file in present}

    def _steps(self, folder: str) -> list[int]:
        """Steps of the files named like 000010.jsonl in the folder."""
        names = (file.stem for file in (self.path / folder).glob("*.jsonl"))
        return sorted(int(name) for name in names if STEP.fullmatch(name))

    def group_steps(self) -> list[int]:
        return self._steps("groups")

    def groups(self, step: int) -> list[Row]:
        """The groups of one training step, written by groups.py; images are under groups/."""
        groups = []
        for line in self.text(f"groups/{step:06d}.jsonl").splitlines():
            row = _loads(line) or {}
            samples, shown = row.get("samples"), row.get("shown", [])
            if not isinstance(samples, list) or not isinstance(shown, list):
                continue  # incomplete: a resumed run writes it again
            if not all(isinstance(sample, dict) for sample in samples):
                continue
            row["shown"] = [f"groups/{name}" for name in shown]
            row["samples"] = samples = [renamed(s, older_names.SAMPLES) for s in samples]
            for sample in samples:
                for key in ("image", "video"):
                    if key in sample:
                        sample[key] = f"groups/{sample[key]}"
            groups.append(row)
        return groups


def family(config: Mapping[str, Any]) -> str:
    """ "flow" or "language"; "flow" if a config of another version does not state it."""
    return config_family(config.get("model", {}))


def _frames(config: Mapping[str, Any]) -> int:
    """Frames per sample; 1 is an image."""
    section = config.get("model")
    frames = section.get("frames") if isinstance(section, Mapping) else None
    return frames if isinstance(frames, int) else 1


def _cell(row: Shown) -> dict[str, Any]:
    cell: dict[str, Any] = {"reward": row.reward, "parts": row.parts}
    if row.image:
        cell["image"] = f"samples/{row.image}"
        if row.video:
            cell |= {"video": f"samples/{row.video}", "fps": row.fps}
    else:
        cell["response"] = row.response
    details = {"text": row.text, "error": row.error, "right": row.right}
    return cell | {key: value for key, value in details.items() if value not in ("", None)}


def _loads(line: str | bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _texts(value: Any) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _absurd(value: Any) -> bool:
    """An integer beyond the range of a float, which cannot be a metric."""
    return isinstance(value, int) and abs(value) > 10**300


def _number(value: Any) -> Any:
    """The value if it is a finite number, otherwise None."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if plain and math.isfinite(value) else None


def _name(config: Mapping[str, Any], section: str, key: str) -> str:
    table = config.get(section)
    return str(table.get(key, "")) if isinstance(table, dict) else ""


def _expected(table: Any) -> dict[str, Any] | None:
    """What the authors of the recipe report, with the points in the order of their steps."""
    try:
        expect = Expect.model_validate(table)
    except ValueError:  # none, or a config of another version
        return None
    points = sorted((int(step), value) for step, value in expect.points.items())
    if expect.start is not None:
        points = [(0, expect.start), *points]
    return {
        "metric": expect.metric,
        "value": expect.value,
        "source": expect.source,
        "steps": [step for step, _ in points],
        "values": [value for _, value in points],
    }


def _samples_per_step(config: Mapping[str, Any]) -> int | None:
    data, algorithm = config.get("data"), config.get("algorithm")
    if not isinstance(data, dict) or not isinstance(algorithm, dict):
        return None
    groups, group = _number(data.get("groups")), _number(algorithm.get("group"))
    return int(groups * group) if groups and group else None

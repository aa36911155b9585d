"""A run folder as one page, `report.html`: figures, curves, and above all the same prompts and
seeds at every evaluation (samples.py). One file with everything inside; nothing is fetched.

The folder may be that of an unfinished, killed or resumed run. What is damaged is left out and
named on the page. Every text from outside goes through `esc`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape as esc
from pathlib import Path
from typing import Any, TypeVar

from gesso.track import samples
from gesso.track.console import clock, held_out_key
from gesso.track.samples import Shown
from gesso.types import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NOTES = 300  # lines of log.txt shown, the newest
DOTS = 16  # a line with more points has no visible dots
BIG, SMALL = (470, 230), (190, 104)  # width and height of a chart
DETAILS = [  # small charts, of what is there
    "update/ratio", "update/clipped", "update/drift", "update/kl", "update/abs_dlogp",
    "update/importance", "update/grad_norm", "update/entropy", "update/value", "update/value_error",
    "reply/length", "reply/longest", "reply/cut", "reply/logp", "advantage/flat_groups",
    "advantage/used", "refilled", "reward/at_max", "diversity", "samples_per_s",
]  # fmt: skip
STYLE = Path(__file__).with_suffix(".css")
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy"
content="default-src 'none';img-src data:;style-src 'unsafe-inline'">
<title>{title}</title><style>{css}</style></head><body>\n{body}\n</body></html>\n"""

Row = Mapping[str, Any]
Points = list[tuple[int, float]]  # (step, value)


def write(run: Path) -> Path:
    """Build `run/report.html` anew, whole or not at all."""
    if not run.is_dir():
        raise UserError(f"no run folder at {run}; expected the folder that `gesso train` made")
    aside = run / ".report.html.new"
    aside.write_bytes(page(run).encode("utf-8", "replace"))
    return aside.replace(run / "report.html")


def page(run: Path) -> str:
    damaged: list[str] = []  # sentences about what could not be read
    config, log = _text(run / "config.toml"), _text(run / "log.txt").splitlines()[-NOTES:]
    settings = _settings(config, damaged)
    metrics = lines(run / "metrics.jsonl", _step, damaged)
    by_step = {row["step"]: row for row in metrics}
    rows = [by_step[step] for step in sorted(by_step)]  # of a step written twice, the later
    for key, value, step in ((*item, row["step"]) for row in rows for item in row.items()):
        if isinstance(value, float) and not math.isfinite(value):
            damaged.append(f"{key} is {value} at step {step}")
    files = sorted(f for f in (run / "samples").glob("*.jsonl") if f.stem.isdigit())
    kept = {int(file.stem): lines(file, Shown.of, damaged) for file in files}
    figures = dict(series(rows, held_out_key(key for row in rows for key in row)))
    title = esc(settings.get("about") or run.resolve().name)
    warning = "".join(f"<li>{esc(text)}</li>" for text in damaged)
    body = [
        f"<h1>{title}</h1><small>{esc(run.resolve().name)}</small>",
        headline(rows) + facts(settings, rows) + (f"<ul>{warning}</ul>" if warning else ""),
        curves(rows) + samples.section(run / "samples", kept, figures) + details(rows),
        f"<h2>Notes</h2><pre>{esc(chr(10).join(log)) or 'none'}</pre>",
        f"<details><summary>config.toml</summary><pre>{esc(config)}</pre></details>",
    ]
    return PAGE.format(title=title, css=STYLE.read_text(encoding="utf-8"), body="\n".join(body))


def headline(rows: Sequence[Row]) -> str:
    key = held_out_key(key for row in rows for key in row)
    points = series(rows, key)
    if not points:
        return '<p class="head"><i>no evaluation yet</i></p>'
    ends = points[:1] + points[1:][-1:]
    figures = " <i>→</i> ".join(f"{value:.3f}" for _, value in ends)
    steps = " → ".join(f"step {step}" for step, _ in ends)
    return f'<p class="head">{figures}</p><i>held-out {esc(key)}, {steps}</i>'


def facts(settings: Mapping[str, str], rows: Sequence[Row]) -> str:
    done = rows[-1]["step"] if rows else 0
    totals = [value for _, value in series(rows, "time/total")]  # over all sittings of the run
    speed = sorted(value for _, value in series(rows, "samples_per_s"))
    table = {
        "algorithm": settings.get("algorithm.name"),
        "model": settings.get("model.path"),
        "steps": f"{done} of {settings.get('steps', '?')}",
        "seed": settings.get("seed"),
        "duration": clock(totals[-1]) if totals else None,
        "samples/s (median)": f"{speed[len(speed) // 2]:.3g}" if speed else None,
    }
    cells = (f"<div><dt>{k}</dt><dd>{esc(v)}</dd></div>" for k, v in table.items() if v)
    return f"<dl>{''.join(cells)}</dl>"


def curves(rows: Sequence[Row]) -> str:
    keys = {"eval/reward"}.union(*rows)
    span = (rows[0]["step"], rows[-1]["step"]) if rows else (0, 0)
    head, big = held_out_key(keys), ""
    total = series(rows, "eval/reward")
    said = {k for k in keys if k.startswith("eval/") and k != "eval/reward"}
    said -= {k for k in said if series(rows, k) == total}  # the only reward is the total
    if not any(value for _, value in series(rows, "eval/failed")):
        said -= {"eval/failed"}
    order = (head if head in said else "eval/reward", "eval/reward")
    for key in sorted({"eval/reward", *said}, key=lambda k: (k != order[0], k != order[1], k)):
        twin = "reward" if key == "eval/reward" else key.replace("eval", "reward", 1)
        lines = {"held-out": series(rows, key), "training": series(rows, twin)}
        big += chart(key, lines, span, BIG)
    return f'<h2>Curves</h2><div class="big">{big}</div>'


def details(rows: Sequence[Row]) -> str:
    keys = set[str]().union(*rows)
    span = (rows[0]["step"], rows[-1]["step"]) if rows else (0, 0)
    small = DETAILS + sorted(key for key in keys if key.startswith("time/") and key != "time/total")
    rest = "".join(chart(key, {"": series(rows, key)}, span, SMALL) for key in small)
    return f'<h2>Details</h2><div class="small">{rest}</div>'


def chart(name: str, lines: Mapping[str, Points], span: Sequence[int], size: Sequence[int]) -> str:
    """Lines over the steps of `span`, the values as hover titles; "" when there is no point."""
    lines = {label: points for label, points in lines.items() if points}
    values = [value for points in lines.values() for _, value in points]
    if not values:
        return ""
    (width, height), left, reach = size, 46, max(span[1] - span[0], 1)
    marks = ticks(min(values), max(values), 4 if size == BIG else 2)
    gap, room = marks[1] - marks[0], height - 28

    def at(step: int, value: float) -> tuple[str, str]:
        x = left + 4 + (step - span[0]) / reach * (width - left - 10)
        return f"{x:.1f}", f"{10 + room * (marks[-1] - value) / (marks[-1] - marks[0]):.1f}"

    drawn = f'<text x="{left}" y="{height - 4}">step {span[0]}</text>'
    drawn += f'<text x="{width - 4}" y="{height - 4}" text-anchor="end">{span[1]}</text>'
    for mark in marks:
        y, text = at(0, mark)[1], _figure(mark, gap)
        drawn += f'<line x1="{left}" x2="{width}" y1="{y}" y2="{y}"/>'
        drawn += f'<text x="{left - 5}" y="{y}" dy="3.5" text-anchor="end">{text}</text>'
    for label, points in reversed(lines.items()):  # held-out on top
        path, dots = " ".join(",".join(at(*point)) for point in points), ""
        for step, value in points:
            x, y = at(step, value)
            title = f"<title>step {step}: {label} {_figure(value, gap / 100)}</title>"
            dots += f'<circle cx="{x}" cy="{y}" r="3">{title}</circle>'
        kind = f"l{int(label == 'training')}{' dense' if len(points) > DOTS else ''}"
        drawn += f'<g class="{kind}"><polyline points="{path}"/>{dots}</g>'
    legend = "".join(f'<span class="k{int(n == "training")}">● {n}</span>' for n in lines if n)
    latest = _figure(next(iter(lines.values()))[-1][1], gap / 10)
    svg = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{esc(name)}">{drawn}</svg>'
    title = f"<span>{esc(name).replace('/', '/<wbr>')}</span>"  # long names break there
    return f"<figure><figcaption>{title} {legend}<b>{latest}</b></figcaption>{svg}</figure>"


def series(rows: Sequence[Row], key: str) -> Points:
    """(step, value) of every row that has a finite `key`."""
    points = [(row["step"], row[key]) for row in rows if key in row]
    return [(s, v) for s, v in points if isinstance(v, (int, float)) and math.isfinite(v)]


def ticks(low: float, high: float, parts: int) -> list[float]:
    """Round values around low … high, at least two; from 0 where that costs little room."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (0.0, 1.0)
    elif 0 < low < high / 2:
        low = 0.0
    base = 10.0 ** math.floor(math.log10((high - low) / parts))
    step = next(m * base for m in (1, 2, 5, 10, 20) if m * base * parts >= (high - low) * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def _figure(value: float, gap: float) -> str:
    """With as many digits as tell apart values that lie `gap` from each other."""
    digits = max(0, -math.floor(math.log10(gap) + 1e-9))
    return f"{value:.2g}" if digits > 6 or abs(value) >= 1e5 else f"{value:.{digits}f}"


def _settings(text: str, damaged: list[str]) -> dict[str, str]:
    """A recipe's values by dotted name: "steps", "model.path"."""
    try:
        config = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        damaged.append(f"config.toml cannot be read: {error}")
        return {}
    inner = {f"{a}.{b}": v for a, t in config.items() if isinstance(t, dict) for b, v in t.items()}
    return {key: str(value) for key, value in (config | inner).items()}


def _text(file: Path) -> str:
    return file.read_text("utf-8", "replace") if file.is_file() else ""


def _step(row: Row) -> Row | None:
    """A row of metrics.jsonl, or None."""
    return row if isinstance(row.get("step"), int) else None


T = TypeVar("T")


def lines(file: Path, parse: Callable[[Row], T | None], damaged: list[str]) -> list[T]:
    """The whole rows of a .jsonl; those that `parse` makes nothing of are named in `damaged`."""
    rows = []
    for number, line in enumerate(file.read_bytes().splitlines(True) if file.is_file() else [], 1):
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            row = None
        found = parse(row) if isinstance(row, dict) else None
        if found is None:
            damaged.append(f"{file.name}, line {number}: half-written or damaged, left out")
        else:
            rows.append(found)
    return rows

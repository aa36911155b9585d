"""The page as a single self-contained HTML file. It is the same page with the server's responses
embedded under the same addresses. Images are downscaled, and long runs are thinned out."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from gesso.track.atomic import write_atomic
from gesso.types import UserError
from gesso.viewer import timelines
from gesso.viewer.files import NotShown, Thumbnails, find_runs, image_file, video_file
from gesso.viewer.reading import RunReader
from gesso.viewer.thinning import spread

PAGE = Path(__file__).parent / "page"
STYLES = ("style.css", "views.css")
SCRIPTS = (
    "core.js", "charts.js", "video.js", "film.js", "runs.js", "evolution.js", "responses.js",
    "curves.js", "groups.js", "timeline.js", "play.js", "notes.js", "app.js",
)  # fmt: skip
PARTS = (*STYLES, *SCRIPTS)
WIDTH = 384  # px: width of embedded images
PROMPTS, EVALUATIONS, GROUP_STEPS, TIMELINE_STEPS = 24, 12, 6, 6  # maximum numbers in the file
VIDEO_BYTES = 32 * 2**20  # of embedded videos
POINTS = 500  # maximum number of points per curve


def index(max_upload: int) -> str:
    """The page as the server sends it. `max_upload`: bytes of a file in the playground."""
    scripts = "".join(f'<script src="{name}" defer></script>' for name in SCRIPTS)
    styles = "".join(f'<link rel="stylesheet" href="{name}">' for name in STYLES)
    limit = f'<meta name="max-upload" content="{max_upload}">'
    return _page("gesso", limit + styles + scripts, "")


def page(runs: Mapping[str, RunReader], thumbnails: Thumbnails | None = None) -> str:
    """The page with these runs embedded. `thumbnails` caches images for later calls."""
    thumbnails = Thumbnails() if thumbnails is None else thumbnails
    images = {name: _images(reader, thumbnails) for name, reader in runs.items()}
    inside = {"answers": _answers(runs), "images": images}
    data = as_json(inside).replace("<", "\\u003c")
    style = "\n".join((PAGE / name).read_text("utf-8") for name in STYLES)
    script = "\n".join((PAGE / name).read_text("utf-8") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data: blob:; media-src data:"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style}</style>'
        f'<script type="application/json" id="inside">{data}</script>'
    )
    title = " · ".join(["gesso", *(Path(name).name for name in runs)])
    return _page(title, head, f"<script>{script}</script>")


def write(root: Path, target: Path, thumbnails: Thumbnails | None = None) -> Path:
    """Writes the runs under a folder, or the run in it, to one file. `thumbnails` caches images
    for callers that write the report repeatedly."""
    readers = {name: RunReader(path) for name, path in find_runs(root).items()}
    if not readers:
        raise UserError(f"no run under {root}; train one first, for example `gesso train demo`")
    if target.is_dir():
        raise UserError(f"{target} is a folder; expected the name of an HTML file")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, page(readers, thumbnails).encode("utf-8", "replace"))
    return target


def as_json(value: Any) -> str:
    """JSON in which non-finite numbers are null, since browsers do not parse NaN."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _page(title: str, head: str, end: str) -> str:
    body = (PAGE / "body.html").read_text("utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title>{head}</head><body>\n{body}\n{end}</body></html>\n"
    )


def _answers(runs: Mapping[str, RunReader]) -> dict[str, Any]:
    """Address → response of the server."""
    table: list[Any] = []
    answers: dict[str, Any] = {}
    for name, reader in runs.items():
        details = {"id": name, **reader.details()}
        details["group_steps"] = steps = spread(details["group_steps"], GROUP_STEPS)
        table.append({key: details[key] for key in ("id", *reader.summary())})
        answers[_address("/api/run", run=name)] = details
        answers[_address("/api/curves", run=name)] = reader.curves(details["keys"], POINTS)
        answers[_address("/api/evolution", run=name)] = _shorter(reader.evolution())
        for step in steps:
            answers[_address("/api/groups", run=name, step=step)] = reader.groups(step)
        recorded = timelines.steps_of(reader)
        timeline = timelines.summary(recorded)
        timeline["steps"] = timeline["steps"][-TIMELINE_STEPS:]
        answers[_address("/api/timeline", run=name)] = timeline
        for step in timeline["steps"]:
            spans = timelines.step(recorded, step)
            answers[_address("/api/timeline", run=name, step=step)] = spans
    return {"/api/runs": table, **answers}


def _address(path: str, **query: Any) -> str:
    return f"{path}?{urlencode(query)}"


def _shorter(evolution: dict[str, Any]) -> dict[str, Any]:
    columns = spread(range(len(evolution["steps"])), EVALUATIONS)
    prompts = [
        {**prompt, "cells": [prompt["cells"][i] for i in columns]}
        for prompt in evolution["prompts"][:PROMPTS]
    ]
    return {
        "steps": [evolution["steps"][i] for i in columns],
        "prompts": prompts,
        "size": evolution["size"],
    }


def _images(reader: RunReader, thumbnails: Thumbnails) -> dict[str, str]:
    """Every image in the responses, as a data URI; damaged images are skipped and the page shows
    them as unreadable."""
    uris = {}
    for name in _image_names(reader):
        try:
            data = thumbnails.get(image_file(reader.path, name), WIDTH)
        except NotShown:
            continue
        uris[name] = f"data:image/webp;base64,{base64.b64encode(data).decode()}"
    return uris | _videos(reader)


def _videos(reader: RunReader) -> dict[str, str]:
    """Videos of the first and the last evaluation, up to VIDEO_BYTES; of the others the page shows
    the first frame."""
    uris, size = {}, 0
    for prompt in _shorter(reader.evolution())["prompts"]:
        for cell in dict.fromkeys((0, -1)):
            name = (prompt["cells"][cell] or {}).get("video", "")
            try:
                data = video_file(reader.path, name).read_bytes()
            except (NotShown, OSError):
                continue
            size += len(data)
            if size <= VIDEO_BYTES:
                uris[name] = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
    return uris


def _image_names(reader: RunReader) -> Iterator[str]:
    for prompt in _shorter(reader.evolution())["prompts"]:
        yield from prompt["shown"]
        yield from (cell["image"] for cell in prompt["cells"] if cell and "image" in cell)
    for step in spread(reader.group_steps(), GROUP_STEPS):
        for group in reader.groups(step):
            yield from group["shown"]
            yield from (s["image"] for s in group["samples"] if "image" in s)

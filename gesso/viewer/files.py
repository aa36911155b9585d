"""Which runs and files may be shown. A run is one of those found under the folder that was given;
a file is a picture that a run writes, by the names it writes. Nothing else can be asked for: no
path is built from what a browser sends but by matching it, and links are not followed."""

from __future__ import annotations

import io
import os
import re
from collections import OrderedDict
from pathlib import Path

from gesso.types import UserError

DEPTH = 3  # folders between the one given and a run
PICTURE = re.compile(
    r"samples/\d{6,}/\d{3,}\.png"
    r"|samples/prompts/\d{3,}-\d+\.png"
    r"|groups/\d{6,}/\d{3,}-(\d{2,}|shown-\d+)\.webp"
)
WIDTHS = (96, 192, 384)  # of small versions; others are not made
KEPT = 64 * 2**20  # bytes of small versions that are remembered
PIXELS = 64 * 2**20  # of a picture that is opened; a bomb has more


class NotShown(Exception):
    """There is no such file, or it is none that may be shown."""


def find_runs(root: Path) -> dict[str, Path]:
    """Runs under `root` by their path from there; or `root` itself where it is a run."""
    if not root.is_dir():
        raise UserError(f"no folder {root}; expected the folder of runs, or one run")
    if (root / "config.toml").is_file():
        return {root.resolve().name: root}
    runs: dict[str, Path] = {}
    for folder, inside, files in os.walk(root):  # does not follow links
        here = Path(folder)
        parts = here.relative_to(root).parts
        if "config.toml" in files and parts:
            runs["/".join(parts)] = here
            inside.clear()
        elif len(parts) >= DEPTH:
            inside.clear()
        else:
            inside[:] = sorted(name for name in inside if not name.startswith("."))
    return runs


def picture(run: Path, name: str) -> Path:
    """The file of a picture of this run."""
    if not PICTURE.fullmatch(name):
        raise NotShown(f"no picture {name!r} in a run folder")
    path = run / name
    steps = [path, *list(path.parents)[: len(Path(name).parts) - 1]]
    if any(step.is_symlink() for step in steps) or not path.is_file():
        raise NotShown(f"no picture {name} in {run.name}")
    return path


class Thumbnails:
    """Small versions of pictures, made when first asked for; the latest are remembered."""

    def __init__(self, limit: int = KEPT) -> None:
        self.limit = limit
        self._made: OrderedDict[tuple[Path, int, int], bytes] = OrderedDict()
        self._size = 0

    def get(self, path: Path, width: int) -> bytes:
        """WebP of this width, or of the picture's own if that is less."""
        if width not in WIDTHS:
            raise NotShown(f"no pictures of width {width}; there are {WIDTHS}")
        key = (path, path.stat().st_mtime_ns, width)
        if key in self._made:
            self._made.move_to_end(key)
            return self._made[key]
        data = encode(path, width)
        self._made[key] = data
        self._size += len(data)
        while self._size > self.limit and len(self._made) > 1:
            self._size -= len(self._made.popitem(last=False)[1])
        return data


def encode(path: Path, width: int) -> bytes:
    """A picture decoded and encoded anew, so that nothing else can come along."""
    from PIL import Image

    try:
        with Image.open(path) as opened:
            if opened.width * opened.height > PIXELS:
                raise NotShown(f"{path.name} has {opened.width} × {opened.height} pixels: too many")
            image = opened.convert("RGB")
    except NotShown:
        raise
    except Exception as error:  # Pillow answers a damaged file with a dozen types
        raise NotShown(f"{path.name} cannot be read: {error}") from error
    small = image.width <= width
    if not small:
        height = max(1, round(image.height * width / image.width))
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    data = io.BytesIO()
    image.save(data, "webp", lossless=small and image.width * image.height < 2**16, quality=85)
    return data.getvalue()

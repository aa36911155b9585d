"""Controls which runs and files can be requested: runs found under the given folder, and images and
videos with the file names that runs use. Nothing else is accessible: a path from a request is used
only if it matches these names, and links are not followed."""

from __future__ import annotations

import io
import os
import re
from collections import OrderedDict
from pathlib import Path

from gesso.types import UserError

DEPTH = 3  # maximum number of folders between the given folder and a run
IMAGE_NAME = re.compile(
    r"samples/\d{6,}/\d{3,}\.png"
    r"|samples/prompts/\d{3,}-\d+\.png"
    r"|groups/\d{6,}/\d{3,}-(\d{2,}|shown-\d+)\.webp"
)
VIDEO_NAME = re.compile(r"samples/\d{6,}/\d{3,}\.mp4|groups/\d{6,}/\d{3,}-\d{2,}\.mp4")
WIDTHS = (96, 192, 384)  # supported widths of thumbnails
CACHE_BYTES = 64 * 2**20  # of cached thumbnails
MAX_PIXELS = 64 * 2**20  # of an image that is opened; decompression bombs have more


class NotShown(Exception):
    """There is no such file, or it may not be served."""


def find_runs(root: Path) -> dict[str, Path]:
    """Runs under `root` by their relative path; or `root` itself if it is a run."""
    if not root.is_dir():
        raise UserError(f"folder {root} does not exist; expected a folder of runs, or one run")
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


def image_file(run: Path, name: str) -> Path:
    """The file of an image of this run."""
    return _file(run, name, IMAGE_NAME, "an image")


def video_file(run: Path, name: str) -> Path:
    """The file of a video of this run."""
    return _file(run, name, VIDEO_NAME, "a video")


def _file(run: Path, name: str, pattern: re.Pattern[str], what: str) -> Path:
    if not pattern.fullmatch(name):
        raise NotShown(f"{name!r} is not the name of {what} in a run folder")
    path = run / name
    steps = [path, *list(path.parents)[: len(Path(name).parts) - 1]]
    if any(step.is_symlink() for step in steps) or not path.is_file():
        raise NotShown(f"no {what.split()[1]} {name} in {run.name}")
    return path


class Thumbnails:
    """Thumbnails of images, created on first use and cached up to `limit` bytes."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self.limit = limit
        self._made: OrderedDict[tuple[Path, int, int], bytes] = OrderedDict()
        self._size = 0

    def get(self, path: Path, width: int) -> bytes:
        """WebP of this width, or of the width of the image if that is smaller."""
        if width not in WIDTHS:
            raise NotShown(f"thumbnails of width {width} are not supported; use one of {WIDTHS}")
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
    """An image, decoded and re-encoded, so that no other file content is served."""
    from PIL import Image

    try:
        with Image.open(path) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise NotShown(
                    f"{path.name} has {opened.width} × {opened.height} pixels, which is too many"
                )
            image = opened.convert("RGB")
    except NotShown:
        raise
    except Exception as error:  # Pillow raises a dozen types for damaged files
        raise NotShown(f"{path.name} cannot be read: {error}") from error
    small = image.width <= width
    if not small:
        height = max(1, round(image.height * width / image.width))
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    data = io.BytesIO()
    if small and image.width * image.height < 2**16:
        image.save(data, "webp", lossless=True, method=0)  # the default is 20 times slower or more
    else:
        image.save(data, "webp", quality=85)
    return data.getvalue()

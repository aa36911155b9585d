"""Converts image values of a row to PromptImage and checks that they can be decoded; clips, too.

a path            relative to the folder of the data, to `images/` or `videos/` in it, or to the
                  working directory; also file://…
bytes             of an image file; {"bytes", "path"} as `datasets` and parquet store images
base64            with or without `data:image/…;base64,`
"""

from __future__ import annotations

import base64
import binascii
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gesso.types import Prompt, PromptImage, UserError
from gesso.video_files import PromptClip

FILE, WEB, DATA = "file://", ("http://", "https://"), "data:"
MAX_PATH = 1024  # characters; a longer text is base64
MAX_DECODED = 4096  # images of a source; of the others only the headers are checked
MAX_CLIPS = 256  # the same for clips
SUBFOLDERS = ("images", "videos")  # folders next to the data file, as in Flow-Factory
# First bytes of image files.
SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*")


class InvalidRow(UserError):
    """The row cannot be used; it is skipped, reported and counted."""


def load_images(
    values: Sequence[Any], folder: Path | None, kind: str = PromptImage.kind
) -> tuple[PromptImage, ...]:
    images = []
    for i, value in enumerate(values, 1):
        try:
            images.append(_image(value, folder))
        except InvalidRow as error:
            raise InvalidRow(f"{kind} {i} of {len(values)}: {error}") from None
    return tuple(images)


def load_clips(
    values: Sequence[Any], folder: Path | None, frames: int, fps: float
) -> tuple[PromptClip, ...]:
    images = load_images(values, folder, PromptClip.kind)
    return tuple(PromptClip(image.path, image.data, frames, fps) for image in images)


def load_image(value: Any, column: str, folder: Path | None) -> PromptImage:
    try:
        return _image(value, folder)
    except InvalidRow as error:
        raise InvalidRow(f'column "{column}": {error}') from None


def _image(value: Any, folder: Path | None) -> PromptImage:
    if isinstance(value, dict) and ("bytes" in value or "path" in value):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes) and value:
        return PromptImage(data=value)
    if isinstance(value, str) and value:
        return _from_text(value, folder)
    raise InvalidRow(f"expected a path, bytes or base64, got {short(value)}")


def _from_text(text: str, folder: Path | None) -> PromptImage:
    if text.startswith(WEB):
        raise InvalidRow(
            f"{short(text)} is a URL, which a run does not download; download the images and give "
            "their paths"
        )
    if text.startswith(DATA):
        kind, _, code = text.partition(";base64,")
        data = _decoded(code)
        if not data:
            raise InvalidRow(f"expected base64 after {short(kind + ';base64,')}, got {short(code)}")
        return PromptImage(data=data)
    paths = [text]
    if text.startswith(FILE):
        plain = text.removeprefix(FILE)
        paths = [plain, urllib.parse.unquote(plain)]
    for name in paths:
        if path := _file(name, folder):
            return PromptImage(path=path)
    data = _decoded(text)
    if data and (data.startswith(SIGNATURES) or len(text) > MAX_PATH):
        return PromptImage(data=data)
    if len(text) > MAX_PATH:
        raise InvalidRow(f"expected a path or base64, got {short(text)}")
    subfolders = "/ or ".join(SUBFOLDERS)
    searched = f" in {folder}, its folder {subfolders}/ or the working directory" if folder else ""
    if any(map(os.path.isdir, _places(paths[0], folder))):
        raise InvalidRow(f"{text!r} is a folder; expected a file{searched}")
    raise InvalidRow(f"no such file {text!r}{searched}")


def _file(name: str, folder: Path | None) -> str | None:
    if len(name) > MAX_PATH:
        return None
    return next((path for path in _places(name, folder) if os.path.isfile(path)), None)


def _places(name: str, folder: Path | None) -> list[str]:
    plain = os.path.expanduser(name)
    if folder is None:
        return [plain]
    subfolders = [os.path.join(folder, name, plain) for name in SUBFOLDERS]
    return [os.path.join(folder, plain), *subfolders, plain]


def _decoded(text: str) -> bytes | None:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return None


@dataclass(frozen=True)
class ImageCheck:
    """What `check_images` found."""

    faults: Sequence[str | None]  # of each prompt: why one of its images cannot be used
    images: int = 0  # that are distinct
    decoded: int = 0


def check_images(prompts: Sequence[Prompt]) -> ImageCheck:
    """Reads the header of every image and clip, and decodes at most MAX_DECODED of them (with clips
    MAX_CLIPS), evenly spaced. An image that several prompts share is read once."""
    distinct = list(dict.fromkeys(image for prompt in prompts for image in prompt.all_images))
    if not distinct:
        return ImageCheck([None] * len(prompts))
    from PIL import Image

    Image.init()  # not thread-safe
    clips = any(isinstance(image, PromptClip) for image in distinct)
    count = min(len(distinct), MAX_CLIPS if clips else MAX_DECODED)
    decoded = {i * len(distinct) // count for i in range(count)}
    full = [i in decoded for i in range(len(distinct))]
    with ThreadPoolExecutor() as threads:  # Pillow releases the GIL while it decodes
        faults = threads.map(lambda image, decode: image.fault(decode), distinct, full)
        reasons = dict(zip(distinct, faults, strict=True))
    found = [_first_fault(prompt.all_images, reasons) for prompt in prompts]
    return ImageCheck(found, len(distinct), count)


def _first_fault(
    images: Sequence[PromptImage], reasons: Mapping[PromptImage, str | None]
) -> str | None:
    found = (
        f"{image.kind} {i} of {len(images)}: {reason}"
        for i, image in enumerate(images, 1)
        if (reason := reasons[image])
    )
    return next(found, None)


def short(value: Any) -> str:
    return repr(value)[:60]


def first_line(error: Exception) -> str:
    """The first line of an error's text, without a full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")

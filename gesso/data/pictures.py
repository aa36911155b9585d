"""What a row says in place of a picture → Picture, and whether it can be decoded.

a path            relative to the folder of the data, else as it is; file://… too
bytes             what a file holds; {"bytes", "path"} as `datasets` and parquet store pictures
base64            with or without `data:image/…;base64,`
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gesso.types import PICTURE_FORMATS, Picture, Prompt, UserError

FILE, WEB, DATA = "file://", ("http://", "https://"), "data:"
LONGEST = 1024  # characters of a path; what is longer is meant as base64
HEADS = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*")


class Unsound(UserError):
    """The row cannot be used; it is left out, named and counted."""


def pictures(values: Sequence[Any], folder: Path | None) -> tuple[Picture, ...]:
    found = []
    for i, value in enumerate(values, 1):
        try:
            found.append(_picture(value, folder))
        except Unsound as error:
            raise Unsound(f"picture {i} of {len(values)}: {error}") from None
    return tuple(found)


def _picture(value: Any, folder: Path | None) -> Picture:
    if isinstance(value, dict) and ("bytes" in value or "path" in value):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes) and value:
        return Picture(data=value)
    if isinstance(value, str) and value:
        return _from_text(value, folder)
    raise Unsound(f"expected a path, bytes or base64, got {short(value)}")


def _from_text(text: str, folder: Path | None) -> Picture:
    if text.startswith(WEB):
        raise Unsound(
            f"{short(text)} lies on the web, where a run does not look; download the pictures and "
            "give their paths"
        )
    if text.startswith(DATA):
        kind, _, code = text.partition(";base64,")
        data = _decoded(code)
        if not data:
            raise Unsound(f"expected base64 after {short(kind + ';base64,')}, got {short(code)}")
        return Picture(data=data)
    names = [text]
    if text.startswith(FILE):
        plain = text.removeprefix(FILE)
        names = [plain, urllib.parse.unquote(plain)]
    for name in names:
        if path := _file(name, folder):
            return Picture(path=path)
    data = _decoded(text)
    if data and (data.startswith(HEADS) or len(text) > LONGEST):
        return Picture(data=data)
    if len(text) > LONGEST:
        raise Unsound(f"expected a path or base64, got {short(text)}")
    beside = f", neither in {folder} nor from here" if folder else ""
    raise Unsound(f"no such file {text!r}{beside}")


def _file(name: str, folder: Path | None) -> str | None:
    if len(name) > LONGEST:
        return None
    plain = os.path.expanduser(name)
    places = [plain] if folder is None else [os.path.join(folder, plain), plain]
    return next((place for place in places if os.path.isfile(place)), None)


def _decoded(text: str) -> bytes | None:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return None


def faults(prompts: Sequence[Prompt]) -> list[str | None]:
    """For each prompt why one of its pictures cannot be decoded, or None. Each is looked at once,
    before the run, however many prompts show it."""
    distinct = list(dict.fromkeys(picture for prompt in prompts for picture in prompt.images))
    if not distinct:
        return [None] * len(prompts)
    from PIL import Image

    Image.init()  # not by several threads at once
    with ThreadPoolExecutor() as threads:  # Pillow decodes without the interpreter's lock
        found = dict(zip(distinct, threads.map(_fault, distinct), strict=True))
    return [
        _first_fault(prompt, [found[picture] for picture in prompt.images]) for prompt in prompts
    ]


def _first_fault(prompt: Prompt, reasons: Sequence[str | None]) -> str | None:
    told = [f"picture {i} of {len(reasons)}: {r}" for i, r in enumerate(reasons, 1) if r]
    return told[0] if told else None


def _fault(picture: Picture) -> str | None:
    from PIL import Image, UnidentifiedImageError

    name = picture.path or f"{len(picture.data):,} bytes"
    try:
        source = io.BytesIO(picture.data) if picture.data else picture.path
        with Image.open(source, formats=PICTURE_FORMATS) as image:
            image.draft("RGB", (1, 1))  # a JPEG at an eighth of its size, in less time
            image.load()  # checksums alone would let broken pixels pass
    except UnidentifiedImageError:
        return f"{name}: no picture; expected one of {', '.join(PICTURE_FORMATS)}"
    except Exception as error:  # damaged files make Pillow fail in many ways
        return f"{name} cannot be decoded: {first_line(error)}"
    return None


def short(value: Any) -> str:
    return repr(value)[:60]


def first_line(error: Exception) -> str:
    """The first line of an error's text: one sentence, not a page."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")

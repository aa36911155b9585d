"""Messages between a driver and its workers: a JSON object and bytes. No pickle.

A frame is the length of the JSON (8 bytes, big-endian), the JSON, whose "sizes" are the lengths of
the byte strings, and the byte strings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gesso.rewards.transport import wire
from gesso.types import (
    OnePass,
    Prompt,
    PromptImage,
    ResponseSpec,
    Sample,
    SampleSpec,
    Trajectory,
)
from gesso.video_files import PromptClip

GRACE = 2.0
"""Seconds that workers have to end by themselves after the driver."""


class Messages(Protocol):
    """One end of a connection."""

    def send(self, message: Mapping[str, Any], *data: bytes) -> None:
        """Raises an OSError if the other end has closed."""

    def receive(self) -> tuple[dict[str, Any], list[bytes]]:
        """Raises EOFError when the other end has closed."""

    def shut(self) -> None:
        """Ends the connection: `receive` raises EOFError."""


def pack_frame(message: Mapping[str, Any], data: Sequence[bytes]) -> bytes:
    text = json.dumps({**message, "sizes": [len(part) for part in data]}).encode()
    return b"".join([len(text).to_bytes(8, "big"), text, *data])


def read_frame(read: Callable[[int], bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """`read` returns the next bytes, as many as requested."""
    message = json.loads(read(int.from_bytes(read(8), "big")))
    return message, [read(size) for size in message.pop("sizes")]


class Channel:
    """One end of a connected socket. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = connection.makefile("rb")
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any], *data: bytes) -> None:
        frame = pack_frame(message, data)
        with self._lock:
            self._socket.sendall(frame)

    def receive(self) -> tuple[dict[str, Any], list[bytes]]:
        return read_frame(self._read)

    def _read(self, size: int) -> bytes:
        try:
            data = self._reader.read(size)
        except OSError as error:
            raise EOFError from error
        if len(data) != size:
            raise EOFError
        return data

    def shut(self) -> None:
        """`receive` at the other end raises EOFError, too."""
        with contextlib.suppress(OSError):  # already closed by the other end
            self._socket.shutdown(socket.SHUT_RDWR)


def end_with_the_driver(life: socket.socket, grace: float = 0.0) -> None:
    """The driver holds the other end: it closes when the driver ends. Then this process has `grace`
    seconds to end by itself."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            life.recv(1)
        time.sleep(grace)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def pack_prompts(prompts: Sequence[Prompt], paths: bool = True) -> bytes:
    """`paths`: images in files are sent as paths, for workers on the same machine."""
    content: list[bytes] = []

    def packed(image: PromptImage) -> tuple[Any, ...]:
        content.append(image.data if paths else image.read())
        clip = (image.count, image.fps) if isinstance(image, PromptClip) else ()
        return image.path, len(content[-1]), *clip

    rows = [
        {
            "text": prompt.text,
            "negative": prompt.negative,
            "columns": prompt.columns,
            "where": prompt.where,
            "images": [packed(image) for image in prompt.images],
            "messages": prompt.messages,
            "given": [each if isinstance(each, str) else packed(each) for each in prompt.given],
            "image_columns": {key: packed(image) for key, image in prompt.image_columns.items()},
        }
        for prompt in prompts
    ]
    return b"".join([json.dumps(rows).encode(), b"\n", *content])


def read_prompts(data: bytes) -> list[Prompt]:
    end = data.index(b"\n")
    position, prompts = end + 1, []

    def image(path: str, size: int, *clip: Any) -> PromptImage:
        nonlocal position
        position += size
        content = data[position - size : position]
        return PromptClip(path, content, *clip) if clip else PromptImage(path, content)

    for row in json.loads(data[:end]):
        values = row | {
            "images": tuple(image(*each) for each in row["images"]),
            "messages": tuple(row["messages"]),
            "given": tuple(e if isinstance(e, str) else image(*e) for e in row["given"]),
            "image_columns": {key: image(*each) for key, each in row["image_columns"].items()},
        }
        prompts.append(Prompt(**values))
    return prompts


def read_samples(data: bytes) -> list[Sample]:
    header, _, rest = data.partition(b"\n")
    position = 0

    def read(size: int) -> bytes:
        nonlocal position
        position += size
        return rest[position - size : position]

    return wire.read_samples(header, read)


RANGES = ("stochastic", "trained", "starts")


def pack_spec(spec: SampleSpec | ResponseSpec) -> dict[str, Any]:
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    if isinstance(spec, ResponseSpec):
        return {"tokens": values}
    for name in RANGES:
        values[name] = [values[name].start, values[name].stop]
    values["record"] = {"one_pass": True} if spec.per_sample_grads else {"means": spec.means}
    return {"image": values}


def read_spec(packed: Mapping[str, Any]) -> SampleSpec | ResponseSpec:
    if "tokens" in packed:
        return ResponseSpec(**packed["tokens"])
    values = dict(packed["image"])
    for name in RANGES:
        values[name] = range(*values[name])
    record = values["record"]
    values["record"] = OnePass() if "one_pass" in record else Trajectory(**record)
    return SampleSpec(**values)

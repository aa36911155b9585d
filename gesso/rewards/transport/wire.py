"""Serialises samples and scores: one JSON line, then the images as raw bytes. No pickle.

`samples` frame:  {"samples": [{"text", "negative", "columns", "where", "seed", "response",
                  "tokens", "shape"}, …]} and a line break, then the pixels; a null "response" or
                  "shape" means no text or no image; a "shape" of four numbers is a video, and has
                  "fps". A prompt with messages or images has "messages", "images" and
                  "image_columns": each image is its path and its index into "files", the lengths of
                  the files that follow the pixels, each file once. The index is null if the file is
                  missing: opening it raises.
`scores` frame:   {"scores": [{"value", "parts", "text", "error"}, …]}\\n
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gesso.types import Prompt, PromptImage, Sample, Score, UserError

if TYPE_CHECKING:
    import numpy as np


def pack_samples(samples: Sequence[Sample]) -> bytes:
    files = _files(samples)
    indices = {image: i for i, image in enumerate(files)}
    rows = [_row(sample, indices) for sample in samples]
    header: dict[str, Any] = {"samples": rows}
    if files:
        header["files"] = [len(data) for data in files.values()]
    pixels = [s.image.tobytes() for s in samples if s.image is not None]
    return b"".join([json.dumps(header).encode(), b"\n", *pixels, *files.values()])


def _files(samples: Sequence[Sample]) -> dict[PromptImage, bytes]:
    """The content of the prompts' images, each once: samples of a group share them."""
    contents: dict[PromptImage, bytes] = {}
    for image in dict.fromkeys(i for sample in samples for i in sample.prompt.for_rewards):
        try:
            contents[image] = image.read()
        except UserError:
            continue
    return contents


def _row(sample: Sample, indices: dict[PromptImage, int]) -> dict[str, Any]:
    prompt = sample.prompt
    row: dict[str, Any] = {
        "text": prompt.text,
        "negative": prompt.negative,
        "columns": prompt.columns,
        "where": prompt.where,
        "seed": sample.seed,
        "response": sample.text,
        "tokens": sample.tokens,
        "shape": None if sample.image is None else sample.image.shape,
    }
    if prompt.messages:
        row["messages"] = prompt.messages
    if sample.fps is not None:
        row["fps"] = sample.fps
    if sample.given is not None:
        row["given"] = sample.given
    if prompt.images:
        row["images"] = [(image.path, indices.get(image)) for image in prompt.images]
    if prompt.image_columns:
        columns = prompt.image_columns.items()
        row["image_columns"] = {key: (image.path, indices.get(image)) for key, image in columns}
    return row


def read_samples(header: bytes, read: Callable[[int], bytes]) -> list[Sample]:
    frame = json.loads(header)
    rows = frame["samples"]
    images = [None if row["shape"] is None else _pixels(row["shape"], read) for row in rows]
    files = [read(length) for length in frame.get("files", [])]
    samples = []

    def prompt_image(path: str, index: int | None) -> PromptImage:
        return PromptImage(path, b"" if index is None else files[index])

    for row, image in zip(rows, images, strict=True):
        columns = row.get("image_columns", {})
        prompt = Prompt(
            row["text"],
            row["negative"],
            row["columns"],
            row["where"],
            tuple(prompt_image(*each) for each in row.get("images", [])),
            tuple(row.get("messages", [])),
            image_columns={key: prompt_image(*each) for key, each in columns.items()},
        )
        rest = (row["response"], row["tokens"], row.get("given"), row.get("fps"))
        samples.append(Sample(prompt, image, row["seed"], *rest))
    return samples


def _pixels(shape: Sequence[int], read: Callable[[int], bytes]) -> np.ndarray:
    import numpy as np  # not needed by rewards of text

    return np.frombuffer(read(math.prod(shape)), dtype=np.uint8).reshape(shape)


def pack_scores(scores: Sequence[Score]) -> bytes:
    return json.dumps({"scores": [vars(s) for s in scores]}).encode() + b"\n"


def read_scores(line: bytes) -> list[Score]:
    return [Score(**row) for row in json.loads(line)["scores"]]

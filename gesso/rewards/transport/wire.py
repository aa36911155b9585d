"""Samples and scores as bytes: one JSON line, then the pictures raw. No pickle.

`samples` frame:  {"samples": [{"text", "negative", "columns", "where", "seed", "reply", "tokens",
                  "shape"}, …]} and a line break, then the pixels; a null "reply" or "shape" means
                  no text or no picture. A prompt with messages or pictures has "messages" and
                  "images": each its path and its place among "pictures", the lengths of the files
                  that follow the pixels, each once. The place is null where the file is gone:
                  whoever opens it is told.
`scores` frame:   {"scores": [{"value", "parts", "text", "error"}, …]}\\n
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gesso.types import Picture, Prompt, Sample, Score, UserError


def pack_samples(samples: Sequence[Sample]) -> bytes:
    files = _files(samples)
    places = {picture: i for i, picture in enumerate(files)}
    rows = [_row(sample, places) for sample in samples]
    header: dict[str, Any] = {"samples": rows}
    if files:
        header["pictures"] = [len(data) for data in files.values()]
    pixels = [np.ascontiguousarray(s.image).tobytes() for s in samples if s.image is not None]
    return b"".join([json.dumps(header).encode(), b"\n", *pixels, *files.values()])


def _files(samples: Sequence[Sample]) -> dict[Picture, bytes]:
    """What the prompts' pictures hold, each once: samples of a group share theirs."""
    found: dict[Picture, bytes] = {}
    for picture in dict.fromkeys(p for sample in samples for p in sample.prompt.images):
        try:
            found[picture] = picture.read()
        except UserError:
            continue
    return found


def _row(sample: Sample, places: dict[Picture, int]) -> dict[str, Any]:
    prompt = sample.prompt
    row: dict[str, Any] = {
        "text": prompt.text,
        "negative": prompt.negative,
        "columns": prompt.columns,
        "where": prompt.where,
        "seed": sample.seed,
        "reply": sample.text,
        "tokens": sample.tokens,
        "shape": None if sample.image is None else sample.image.shape,
    }
    if prompt.messages:
        row["messages"] = prompt.messages
    if prompt.images:
        row["images"] = [(picture.path, places.get(picture)) for picture in prompt.images]
    return row


def read_samples(header: bytes, read: Callable[[int], bytes]) -> list[Sample]:
    found = json.loads(header)
    rows = found["samples"]
    images = [None if row["shape"] is None else _picture(row["shape"], read) for row in rows]
    files = [read(length) for length in found.get("pictures", [])]
    samples = []
    for row, image in zip(rows, images, strict=True):
        pictures = [
            Picture(path, b"" if place is None else files[place])
            for path, place in row.get("images", [])
        ]
        prompt = Prompt(
            row["text"],
            row["negative"],
            row["columns"],
            row["where"],
            tuple(pictures),
            tuple(row.get("messages", [])),
        )
        samples.append(Sample(prompt, image, row["seed"], row["reply"], row["tokens"]))
    return samples


def _picture(shape: Sequence[int], read: Callable[[int], bytes]) -> np.ndarray:
    return np.frombuffer(read(int(np.prod(shape))), dtype=np.uint8).reshape(shape)


def pack_scores(scores: Sequence[Score]) -> bytes:
    return json.dumps({"scores": [dataclasses.asdict(s) for s in scores]}).encode() + b"\n"


def read_scores(line: bytes) -> list[Score]:
    return [Score(**row) for row in json.loads(line)["scores"]]

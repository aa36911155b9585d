"""Samples and scores as bytes: one JSON line, then the pictures raw. No pickle.

`samples` frame:  {"samples": [{"text", "negative", "columns", "where", "seed", "reply", "shape"},
                  …]} and a line break, then the pixels; a null "reply" or "shape" means no text or
                  no picture
`scores` frame:   {"scores": [{"value", "parts", "text", "error"}, …]}\\n
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence

import numpy as np

from gesso.types import Prompt, Sample, Score


def pack_samples(samples: Sequence[Sample]) -> bytes:
    images = [s.image for s in samples]
    shapes = [None if image is None else image.shape for image in images]
    rows = [
        dataclasses.asdict(s.prompt) | {"seed": s.seed, "shape": shape, "reply": s.text}
        for s, shape in zip(samples, shapes, strict=True)
    ]
    header = json.dumps({"samples": rows}).encode() + b"\n"
    return header + b"".join(np.ascontiguousarray(i).tobytes() for i in images if i is not None)


def read_samples(header: bytes, read: Callable[[int], bytes]) -> list[Sample]:
    samples = []
    for row in json.loads(header)["samples"]:
        shape, seed, text = row.pop("shape"), row.pop("seed"), row.pop("reply")
        image = None if shape is None else _picture(shape, read)
        samples.append(Sample(Prompt(**row), image, seed, text))
    return samples


def _picture(shape: Sequence[int], read: Callable[[int], bytes]) -> np.ndarray:
    return np.frombuffer(read(int(np.prod(shape))), dtype=np.uint8).reshape(shape)


def pack_scores(scores: Sequence[Score]) -> bytes:
    return json.dumps({"scores": [dataclasses.asdict(s) for s in scores]}).encode() + b"\n"


def read_scores(line: bytes) -> list[Score]:
    return [Score(**row) for row in json.loads(line)["scores"]]

"""Samples and scores as bytes: one JSON line, then the pictures raw. No pickle.

`samples` frame:  {"samples": [{"text", "negative", "columns", "where", "seed", "shape"}, …]}
                  and a line break, then the pixels
`scores` frame:   {"scores": [{"value", "parts", "text", "error"}, …]}\\n
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence

import numpy as np

from gesso.types import Prompt, Sample, Score


def pack_samples(samples: Sequence[Sample]) -> bytes:
    rows = [
        dataclasses.asdict(s.prompt) | {"seed": s.seed, "shape": s.image.shape} for s in samples
    ]
    header = json.dumps({"samples": rows}).encode() + b"\n"
    return header + b"".join(np.ascontiguousarray(s.image).tobytes() for s in samples)


def read_samples(header: bytes, read: Callable[[int], bytes]) -> list[Sample]:
    samples = []
    for row in json.loads(header)["samples"]:
        shape, seed = row.pop("shape"), row.pop("seed")
        pixels = np.frombuffer(read(int(np.prod(shape))), dtype=np.uint8)
        samples.append(Sample(Prompt(**row), pixels.reshape(shape), seed))
    return samples


def pack_scores(scores: Sequence[Score]) -> bytes:
    return json.dumps({"scores": [dataclasses.asdict(s) for s in scores]}).encode() + b"\n"


def read_scores(line: bytes) -> list[Score]:
    return [Score(**row) for row in json.loads(line)["scores"]]

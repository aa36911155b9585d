"""The bundled pairs: as the script writes them, and fit for SFT and offline DPO."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from gesso import build
from gesso.config import DataSource
from gesso.data.given import GivenColumns
from gesso.data.readers import read
from gesso.types import Prompt, PromptImage, Size
from gesso.zoo.words import real_words
from tools.zoo import make_pairs


@pytest.mark.parametrize("kind", make_pairs.ROWS)
def test_bundled_pairs(kind: str) -> None:
    lines = (make_pairs.PAIRS / f"{kind}.jsonl").read_text().splitlines()
    assert len(lines) == make_pairs.ROWS[kind]
    written = make_pairs.rows(kind)
    for line, row in zip(lines, written, strict=True):
        found = json.loads(line)
        assert found.keys() == row.keys()
        texts = [key for key in row if isinstance(row[key], str) and "base64" not in row[key]]
        assert len(texts) >= 1 and {k: found[k] for k in texts} == {k: row[k] for k in texts}
    given = GivenColumns(("chosen", "rejected"), "image" if kind == "signs" else "text")
    reading = read(DataSource(path=f"zoo:pairs/{kind}.jsonl"), given=given)
    assert len(reading.prompts) == len(lines) and not reading.left_out
    for prompt in reading.prompts:
        chosen, rejected = prompt.given
        assert chosen != rejected
        if isinstance(chosen, PromptImage):
            assert chosen.size == (32, 96)
            assert prompt.text.split('"')[1] in real_words("train")
        else:
            assert f"<answer>{prompt.columns['answer']}</answer>" in chosen


def test_signs_survive_the_autoencoder() -> None:
    """Encoded and decoded, they are as they were; their latents have the scale of noise."""
    model = build.model(build.recipe("demo-sft"))
    rows = read(DataSource(path="zoo:pairs/signs.jsonl"), given=GivenColumns(("image",), "image"))
    images = [p.given[0] for p in rows.prompts[:16]]
    pixels = np.stack([i.fitted(32, 96) for i in images if isinstance(i, PromptImage)])
    latents = model.encode_images(torch.from_numpy(pixels))
    assert 0.9 < float(latents.std()) < 1.1
    cond = model.encode([Prompt("")] * len(latents), Size(32, 96))
    error = np.abs(model.decode(latents, cond).numpy().astype(float) - pixels)
    assert error.mean() < 3  # of 255; measured: 1.1

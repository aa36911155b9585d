"""cuDNN's attention is chosen only where its gradients are sound. That they are not elsewhere is
seen on a GPU, in tests/test_gpu.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gesso import imports
from gesso.config import Model, TokenModel
from gesso.families import classes
from gesso.models.cudnn import settle_attention
from gesso.models.flow import pipeline
from gesso.models.tokens import transformer
from tests import pipelines, tokens

CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = allowed()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def allowed() -> bool:
    return torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("head", [8, 16, 32, 64, 72, 80, 96, 128, 256, None])
def test_by_the_size_of_heads(head: int | None) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    settle_attention(CPU, head)
    assert allowed()
    settle_attention(CUDA, head)
    assert allowed() == (head == 64)


def test_whoever_switched_it_off_had_a_reason() -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    settle_attention(CUDA, 64)
    assert not allowed()


def test_every_model_settles_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[torch.device, int | None]] = []

    def tell(device: torch.device, head: int | None = None) -> None:
        told.append((device, head))

    monkeypatch.setattr(pipeline, "settle_attention", tell)
    monkeypatch.setattr(transformer, "settle_attention", tell)
    for name, kind in (("sd35", "sd3"), ("flux-dev", "flux"), ("qwen-image", "qwen-image")):
        folder = str(pipelines.build(name, tmp_path / name))
        imports.load(classes.REFERENCES[kind], "model")(
            Model(name=kind, path=folder, text_length=16)
        )
    folder = str(tokens.build("qwen2.5-vl", tmp_path / "writer"))
    kind = "vision-language"
    imports.load(classes.REFERENCES[kind], "model")(TokenModel(name=kind, path=folder))
    assert told == [(CPU, 8), (CPU, 16), (CPU, 16), (CPU, None)]

"""On a CUDA device the host enqueues the loss of a micro-batch and its gradient without reading a
value back. Otherwise the device would be idle while the host prepares the next micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tokens
from tests.algorithms.test_opd import taught
from tests.responses import parts_of, rollout_of
from tests.tokens import Tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kind", ["qwen2", "qwen2.5-vl"])
@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "grpo", "kl": {"place": "loss", "beta": 0.1}, "importance": {}},
        {"name": "ppo"},
        {"name": "dpo"},
        {"name": "sft", "group": 1},
        {"name": "opd"},
    ],
    ids=lambda algorithm: algorithm["name"],
)
def test_a_micro_batch_is_only_enqueued(kind: str, algorithm: dict, tmp_path: Path) -> None:
    tiny = Tiny(kind, tokens.build(kind, tmp_path / "model", 64))
    settings: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "compile": False}
    settings["lora"] = {"rank": 4, "alpha": 8}
    if algorithm["name"] == "opd":
        parts = taught(tiny, {"path": str(tiny.folder)}, model=settings)
    elif algorithm["name"] == "sft":
        parts = parts_of(tiny, algorithm, model=settings, sampler={"engine": "data"})
    else:
        parts = parts_of(tiny, algorithm, model=settings)
    model, chosen, learner = parts.model, parts.algorithm, parts.learner
    rollout = rollout_of(model, tiny.prompts)
    prepared = chosen.prepare(model, rollout, learner.settings, learner.ranks)
    terms = chosen.complete(model, chosen.terms(rollout, prepared), learner.settings, learner.ranks)
    for mode in ("default", "error"):  # images are encoded in the first pass
        torch.cuda.set_sync_debug_mode(mode)
        try:
            chosen.loss(model, terms).loss.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    gradients = [p.grad for p in model.policy.trainable.values() if p.grad is not None]
    assert any(bool(gradient.abs().sum() > 0) for gradient in gradients)

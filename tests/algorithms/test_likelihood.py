"""SFT and DPO of responses through the real model and learner, against plain transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gesso.rollout import Rollout
from gesso.types import Score
from tests import tokens
from tests.responses import Parts, assert_close, moved, parts_of, plain_like, rollout_of
from tests.tokens import Tiny, padded_logits

SFT: dict[str, Any] = {"name": "sft", "group": 1}
DPO: dict[str, Any] = {"name": "dpo", "group": 3, "beta": 0.3}
BEST, WORST = [1, 3, 6], [0, 4, 7]  # of tests/responses.py's rewards


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokens.build("qwen2.5-vl", tmp_path_factory.mktemp("tokens") / "qwen2.5-vl")


def case(folder: Path, algorithm: dict[str, Any]) -> tuple[Tiny, Parts, Rollout]:
    """A policy that has moved since the reference was kept."""
    tiny = Tiny("qwen2.5-vl", folder)
    engine = {"sampler": {"engine": "data"}} if algorithm is SFT else {}
    parts = parts_of(tiny, algorithm, **engine)
    moved(parts.model.policy.trainable)
    return tiny, parts, rollout_of(parts.model, tiny.prompts)


def gradients(parts: Parts, rollout: Rollout, micro_tokens: int) -> list[dict[str, Tensor]]:
    """Of every optimizer step; the weights stay as they are."""
    learner = parts.learner
    learner.settings = learner.settings.model_copy(update={"micro_tokens": micro_tokens})
    found: list[dict[str, Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        trained = learner.policy.trainable
        patch.setattr(
            learner, "_step", lambda: found.append({n: p.grad.clone() for n, p in trained.items()})
        )
        learner.update(rollout, 0)
    return found


def sums(plain: Any, rollout: Rollout, suppressed: Tensor) -> Tensor:
    """(N,) Σℓ at temperature 1, by plain transformers in float64."""
    trace = rollout.token_trace
    prompts = [
        p if p.pixels is None else replace(p, pixels=p.pixels.double()) for p in trace.prompts
    ]
    logits = padded_logits(plain, replace(trace, prompts=prompts), 0)
    logits = logits.index_fill(-1, suppressed, -torch.inf)
    logp = logits.log_softmax(-1).gather(-1, trace.tokens[..., None])[..., 0]
    return torch.where(trace.mask, logp, 0.0).sum(1)


def expected(parts: Parts, plain: Any, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    trained = parts.model.policy.trainable
    return {n: p.grad for n, p in plain.named_parameters() if n in trained}


def test_sft(folder: Path) -> None:
    tiny, parts, rollout = case(folder, SFT)
    plain = plain_like(tiny, parts.model)
    loss = -sums(plain, rollout, parts.model.suppressed).sum() / rollout.mask.sum()
    wanted = expected(parts, plain, loss)
    for budget in (1, 100, 10**6):
        (found,) = gradients(parts, rollout, budget)
        assert_close(found, wanted)
    metrics = parts.learner.update(rollout, 0).metrics
    assert metrics["update/nll"] == pytest.approx(float(loss.detach()), rel=1e-4)


def test_dpo(folder: Path) -> None:
    """Online: the best response of each group against the worst, however they are packed."""
    tiny, parts, rollout = case(folder, DPO)
    plain = plain_like(tiny, parts.model)
    with torch.no_grad():
        reference = sums(plain_like(tiny), rollout, parts.model.suppressed)
    gain = sums(plain, rollout, parts.model.suppressed) - reference
    margin = gain[BEST] - gain[WORST]
    loss = -torch.nn.functional.logsigmoid(0.3 * margin).mean()
    wanted = expected(parts, plain, loss)
    for budget in (1, 100, 10**6):
        (found,) = gradients(parts, rollout, budget)
        assert_close(found, wanted)
    metrics = parts.learner.update(rollout, 0).metrics
    assert metrics["update/preference"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert metrics["update/margin"] == pytest.approx(float(margin.detach().mean()), rel=1e-3)
    assert metrics["update/accuracy"] == pytest.approx(float((margin > 0).double().mean()))
    prepared = parts.algorithm.prepare(parts.model, rollout, parts.recipe.learner)
    assert prepared.advantages.tolist() == [-1, 1, 0, 1, -1, 0, 1, -1, 0]


def test_pairs_stay_together_and_ties_are_no_preference(folder: Path) -> None:
    _, parts, rollout = case(folder, DPO | {"updates": 3})
    assert len(gradients(parts, rollout, 100)) == 3
    ties = [Score(1.0) if 3 <= i < 9 else score for i, score in enumerate(rollout.scores)]
    (found,) = gradients(parts, replace(rollout, scores=ties), 100)
    one = rollout.rows(torch.arange(3))
    (alone,) = gradients(parts, one, 100)
    assert_close(found, alone)
    flat = replace(rollout, scores=[Score(1.0)] * 9)
    assert gradients(parts, flat, 100) == []

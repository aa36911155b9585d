"""The way of CUDA, on a CPU: fixed turns and our own layers, against transformers' layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gesso.config import Lora, TokenModel
from gesso.models.tokens import stepping
from gesso.models.tokens.transformer import TransformerModel
from gesso.samplers import decode
from gesso.samplers.buffers import Buffers
from gesso.samplers.decode import DecodingSampler
from tests import tokens
from tests.samplers.test_decode import ROWS, SPEC, draw, gap
from tests.tokens import Tiny, stirred

LORA = Lora(rank=4, alpha=12)


@pytest.fixture(scope="module", params=tokens.BUILDERS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder: Path = tmp_path_factory.mktemp("stepping") / request.param
    return Tiny(request.param, tokens.build(request.param, folder))


@pytest.fixture
def fixed(monkeypatch: Any) -> list[int]:
    """Turns of fixed shape with our own layers; of every turn, how many slots it fed."""
    turns: list[int] = []
    plain = stepping.Stepper.__call__

    def counted(self: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
        turns.append(len(x))
        return plain(self, x, *args)

    monkeypatch.setattr(decode, "_Decoding", decode._FixedShapeDecoding)
    monkeypatch.setattr(DecodingSampler, "continuous", True)
    monkeypatch.setattr(TransformerModel, "uses_stepper", True)
    monkeypatch.setattr(stepping.Stepper, "__call__", counted)
    return turns


def test_fixed_turns_write_the_same_responses(tiny: Tiny, monkeypatch: Any, fixed: Any) -> None:
    """Slots are used again, responses end early and late, and the host looks a turn behind.
    Adapters are folded in the same way in every kind of model: here, in two."""
    for lora in (None, LORA) if tiny.name in ("qwen2", "qwen3-vl") else (None,):
        model = tiny.model(lora=lora, fold=lora is not None)
        if lora:
            stirred(model)
        found = {batch: draw(DecodingSampler(model, batch), tiny) for batch in (3, 64)}
        assert set(fixed) == {3, len(ROWS)}
        fixed.clear()
        monkeypatch.setattr(decode, "_Decoding", decode._FixedShapeDecoding.__base__)
        monkeypatch.setattr(TransformerModel, "uses_stepper", False)
        plain = draw(DecodingSampler(model, 4), tiny)
        assert not fixed
        for piece in found.values():
            assert torch.equal(piece.trace.tokens, plain.trace.tokens)
            assert torch.equal(piece.trace.mask, plain.trace.mask)
            assert torch.equal(piece.trace.cut, plain.trace.cut)
            assert gap(piece.logp, plain.logp) <= 1e-4
            assert gap(model.logp(piece.trace, 0.9).logp, piece.logp) <= 2e-4
        monkeypatch.setattr(decode, "_Decoding", decode._FixedShapeDecoding)
        monkeypatch.setattr(TransformerModel, "uses_stepper", True)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_the_weights_requested_write(lora: Lora | None, tmp_path: Path, fixed: Any) -> None:
    tiny = Tiny("qwen2", tokens.build("qwen2", tmp_path / "qwen2"))
    model = tiny.model(lora=lora, fold=lora is not None)
    model.policy.snapshot("ema")
    before = draw(DecodingSampler(model, 64), tiny)
    stirred(model)
    average = draw(DecodingSampler(model, 64), tiny, replace(SPEC, weights="ema"))
    assert torch.equal(average.trace.tokens, before.trace.tokens)
    assert gap(average.logp, before.logp) <= 1e-5
    assert not torch.equal(draw(DecodingSampler(model, 64), tiny).trace.mask, before.trace.mask)


def test_a_slot_without_a_response_stays_where_it_is(
    tmp_path: Path, fixed: Any, monkeypatch: Any
) -> None:
    """It is fed like the others; were it to move on, it would leave its room in the cache."""
    tiny = Tiny("qwen2", tokens.build("qwen2", tmp_path / "qwen2"))
    model = tiny.model()
    writing: list[Any] = []
    enter = decode._FixedShapeDecoding._enter

    def entering(self: Any) -> None:
        writing.append(self)
        enter(self)

    monkeypatch.setattr(decode._FixedShapeDecoding, "_enter", entering)
    piece = draw(DecodingSampler(model, 64), tiny)
    prompts = [len(piece.trace.prompts[r]) for r in ROWS]
    responses = piece.trace.mask.sum(1).tolist()
    lengths = writing[0].cache.place.lengths.tolist()
    assert lengths == [p + r - 1 for p, r in zip(prompts, responses, strict=True)]


def test_a_token_for_every_slot_that_runs() -> None:
    """One goes on, one has sampled an id that ends it, one is at its limit; a full slot and an
    empty one are idle. Without such ids, only limits end responses."""
    for ends, still in (([9, 8], [1, 0, 0, 0, 0]), ([], [1, 1, 0, 0, 0])):
        buffers = Buffers(5, 3, torch.device("cpu"), ends)
        buffers.count += torch.tensor([0, 1, 1, 3, 0])
        buffers.limit += torch.tensor([3, 3, 2, 3, 3])
        buffers.last += torch.tensor([1, 2, 3, 4, 5])
        buffers.runs[:3] = True
        new = torch.tensor([7, 8, 7, 8, 7])
        buffers.add_tokens(new, -new.float())
        tokens = [[7, 0, 0], [0, 8, 0], [0, 7, 0], [0, 0, 0], [0, 0, 0]]
        assert buffers.tokens.tolist() == tokens
        assert buffers.logp.tolist() == (-buffers.tokens).tolist()
        assert buffers.count.tolist() == [1, 2, 2, 3, 0]
        assert buffers.position.tolist() == [1, 1, 1, 0, 0]
        assert buffers.last.tolist() == [7, 8, 7, 4, 5]
        assert buffers.runs.tolist() == still
        assert buffers.report.tolist() == [[0, 0 if still[1] else 2, 2, 3, 0], [7, 8, 7, 4, 5]]


def test_the_host_reads_one_turn_behind() -> None:
    """At what has arrived for certain; not at what slots told before others entered them."""
    told = torch.zeros(2, 1, dtype=torch.long)
    readback = decode._Readback(told)
    seen = []
    for turn in range(1, 4):
        told.fill_(turn)
        seen.append(readback())
    readback.discard()
    told.fill_(9)
    assert seen == [None, [[1], [1]], [[2], [2]]] and readback() is None
    assert readback() == [[9], [9]]


def test_folded_weights_are_kept_once(tmp_path: Path, fixed: Any) -> None:
    tiny = Tiny("qwen2", tokens.build("qwen2", tmp_path / "qwen2"))
    model = stirred(tiny.model(lora=LORA, fold=True))
    attention = model.decoder.layers[0].self_attn
    with model.policy.folded(), model.policy.using("current"):
        before = attention.k_proj.folded
        model.generating("current")
        after = [attention.q_proj.folded, attention.k_proj.folded]
        assert torch.equal(before, after[1]) and before.data_ptr() != after[1].data_ptr()
        assert len({w.untyped_storage().data_ptr() for w in after}) == 1
        with model.policy.using("reference"):
            assert torch.equal(attention.k_proj.folded, attention.k_proj.frozen)
        assert attention.k_proj.folded is after[1]


def test_on_a_cpu_decoding_without_adapters(tmp_path: Path) -> None:
    tiny = Tiny("qwen2", tokens.build("qwen2", tmp_path / "qwen2"))
    for lora, fold, own in ((None, None, True), (LORA, True, True), (LORA, None, False)):
        model = tiny.model(lora=lora, fold=fold)
        with model.policy.folded(), model.generating("current")():
            assert (model._stepper is not None) == own


def test_two_adapters_are_not_folded(tmp_path: Path) -> None:
    """A critic's adapter takes turns with the policy's: which is in the weights would change."""
    tiny = Tiny("qwen2", tokens.build("qwen2", tmp_path / "qwen2"))
    model = tiny.model(lora=LORA, fold=True)
    assert model.policy.folds
    model.policy.add_adapter("critic", 0)
    assert not model.policy.folds
    with model.policy.folded():
        assert all(layer.folded is None for layer in model.policy.folding.layers.values())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"fold": True}, r"fold = true needs a LoRA.*set model\.lora\.rank"),
        ({"fold": True, "lora": LORA, "quantize": "nf4"}, "not quantized"),
        ({"compile": True, "lora": LORA, "quantize": "nf4"}, "compile = true does not support"),
    ],
)
def test_what_cannot_be_folded_or_compiled(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TokenModel(path="x", **settings)

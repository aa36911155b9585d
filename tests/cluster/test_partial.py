"""Responses that continue over a change of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gesso import build, families, run
from gesso.config import Lora
from gesso.samplers.decode import DecodingSampler, _Decoding, _FixedShapeDecoding
from gesso.samplers.partial import Begun, PartialResponse
from gesso.traces.tokens import TokenTrace
from gesso.track.run_folder import RunFolder
from gesso.types import ResponseSpec, UserError
from gesso.weights.publish import Publication
from tests import tokens
from tests.cluster.runs import assert_equal, go, language_recipe
from tests.cut_run import cut_after
from tests.tokens import Tiny, stirred

ROWS, SEEDS = [0, 0, 1, 1, 2], [100, 101, 102, 103, 104]
SPEC = ResponseSpec(24, temperature=0.9)
LIMIT = 8


def trace_of(pieces: list[Any]) -> TokenTrace:
    """In the order of the call."""
    index = torch.tensor([i for piece in pieces for i in piece.index])
    return TokenTrace.concat([piece.trace for piece in pieces]).rows(index.argsort())


def continuing(sampler: DecodingSampler, tiny: Tiny, begun: Begun) -> list[Any]:
    pieces = list(sampler.sample(tiny.prompts, ROWS, SEEDS, SPEC, begun=begun))
    assert sorted(i for piece in pieces for i in piece.index) == list(range(len(ROWS)))
    return pieces


def round_of(sampler: DecodingSampler, tiny: Tiny, before: list[PartialResponse]) -> Any:
    pieces = continuing(sampler, tiny, Begun(before, LIMIT))
    found = {i: r for p in pieces for i, r in zip(p.index, p.responses, strict=True)}
    packed = Begun([found[i] for i in range(len(ROWS))], LIMIT).pack()  # as it travels
    return Begun.read(packed).responses


@pytest.mark.parametrize("name, kind", [("qwen2", _Decoding), ("qwen2.5-vl", _FixedShapeDecoding)])
def test_tokens_after_a_swap_are_those_of_the_new_weights(
    name: str, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of 8 tokens, the weights change after the first. Log-probs against the model's own
    pass over prompt and response, with either weights."""
    monkeypatch.setattr("gesso.samplers.decode._Decoding", kind)
    tokens.build(name, tmp_path / name)
    tiny = Tiny(name, tmp_path / name)
    model = tiny.model(lora=Lora(rank=4, alpha=12))
    sampler = DecodingSampler(model, 3)
    plain = trace_of(list(sampler.sample(tiny.prompts, ROWS, SEEDS, SPEC)))
    so_far = round_of(sampler, tiny, [PartialResponse.new() for _ in ROWS])
    for i, response in enumerate(so_far):
        assert response.tokens.tolist() == plain.tokens[i, plain.mask[i]][:LIMIT].tolist()
        assert response.done == (plain.mask[i].sum() < LIMIT)
    swapped = tiny.model(lora=Lora(rank=4, alpha=12))
    other = DecodingSampler(stirred(swapped), 3)
    other.accept(Publication(7, {"current": swapped.policy.tensors()}))
    while not all(response.done for response in so_far):
        so_far = round_of(other, tiny, so_far)
    trace = trace_of(continuing(other, tiny, Begun(so_far, 0)))
    assert trace.versions is not None
    before = torch.arange(trace.tokens.shape[1]) < LIMIT
    assert torch.equal(trace.versions, torch.where(trace.mask & ~before, 7, 0))
    assert (trace.mask & ~before).any(1).sum() > 1
    old, new = (each.logp(trace, 0.9).logp for each in (model, swapped))
    expected = torch.where(before, old, new)
    for i, response in enumerate(so_far):
        length = int(trace.mask[i].sum())
        assert torch.allclose(response.logp, expected[i, :length], atol=2e-5)
    assert not torch.allclose(old, new, atol=1e-2)


def recipe(language: Path, **changes: Any) -> dict[str, Any]:
    """Rounds of 4 tokens."""
    data = language_recipe(language, {"name": "grpo", "max_tokens": 12})
    data |= {"lag": 3, "partial": True, "steps": 6, "save": {"every": 1, "keep": 9}}
    data["sampler"] = {"batch": 8}
    return data | changes


@pytest.fixture(scope="module")
def whole(language: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return go(recipe(language), tmp_path_factory.mktemp("partial") / "whole")


@pytest.mark.usefixtures("borrowing")
@pytest.mark.parametrize("step, samplers", [(1, 0), (3, 2)])
def test_a_resumed_run_ends_the_same(
    whole: RunFolder, tmp_path: Path, step: int, samplers: int
) -> None:
    """In one process, and with any number of samplers apart."""
    cut = cut_after(whole, step, tmp_path / "cut")
    cluster = ["cluster.workers=1", f"cluster.samplers={samplers}"] if samplers else []
    assert_equal(whole, run.resume(cut, quiet=True, overrides=cluster))


@pytest.mark.usefixtures("borrowing")
def test_a_finished_run_goes_on_as_a_longer_one(whole: RunFolder, tmp_path: Path) -> None:
    """The checkpoint of its last step has no responses, but the weights for all their rounds. These
    are shorter than before, without the batches that were trained on: log-probs round otherwise."""
    cut = cut_after(whole, 4, tmp_path / "cut")
    (cut / "checkpoints" / "000004" / "in_flight.tensors").unlink()
    resumed = run.resume(cut, quiet=True, overrides=["cluster.workers=1", "cluster.samplers=1"])
    for row, expected in zip(resumed.rows()[5:], whole.rows()[5:], strict=True):
        for key in ("reward", "response/length", "diversity", "age", "age/mean", "age/continued"):
            assert row[key] == expected[key]
        for key in ("update/grad_norm", "update/abs_dlogp", "update/ratio"):
            assert row[key] == pytest.approx(expected[key], rel=1e-4)


@pytest.mark.usefixtures("borrowing")
def test_samplers_do_not_change_a_bit(whole: RunFolder, language: Path, tmp_path: Path) -> None:
    assert_equal(whole, go(recipe(language), tmp_path / "apart", 1, samplers=1))


def test_ages_are_those_of_the_tokens(whole: RunFolder) -> None:
    """All batches that the first update waits for have version 0; from then on a batch is begun
    `lag` updates before its own."""
    rows = whole.rows()[1:]
    assert [row["age"] for row in rows] == [0, 1, 2, 3, 3, 3]
    assert [row["age/mean"] for row in rows[:4]] == [0, 1, 2, 3]
    assert all(1 < row["age/mean"] < 3 and row["age/continued"] > 0 for row in rows[4:])


def test_with_the_same_weights_responses_are_the_same(language: Path, tmp_path: Path) -> None:
    """Up to rounding in their log-probs."""
    still = {"optimizer": {"lr": 0.0}, "steps": 5}
    runs = [
        go(recipe(language, **still, partial=partial), tmp_path / str(partial))
        for partial in (True, False)
    ]
    one, other = ([row for row in run.rows() if "reward" in row] for run in runs)
    for key in ("reward", "response/length", "response/truncated", "diversity"):
        assert [row[key] for row in one] == [row[key] for row in other]
    assert one[-1]["age/continued"] > 0 and one[-1]["update/first_abs_dlogp_max"] < 1e-4


def test_damaged_responses_are_not_continued(whole: RunFolder, tmp_path: Path) -> None:
    cut = cut_after(whole, 3, tmp_path / "cut")
    file = cut / "checkpoints" / "000003" / "in_flight.tensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"in_flight.tensors is damaged; restore it"):
        run.resume(cut, quiet=True)
    file.unlink()
    run.resume(cut, quiet=True)
    assert "batch 4 is sampled with newer weights" in (cut / "log.txt").read_text()


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"lag": 1}, "requires lag of at least 2, the rounds of a response, got lag = 1"),
        ({"sampler": {"engine": "vllm"}}, 'built-in decoder, got sampler.engine = "vllm"'),
        ({"algorithm": {"name": "remax"}}, 'the greedy baseline of algorithm "remax"'),
        ({"partial": "some"}, "partial"),
    ],
)
def test_what_partial_requires(language: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        build.recipe_from(recipe(language, **changes))
    assert sentence in str(error.value)


def test_check_says_what_it_does() -> None:
    recipe = build.recipe("demo-vlm", ["partial=true", "lag=3"])
    (note,) = families.of(recipe).notes(recipe, build.algorithm(recipe))
    assert "up to 11 tokens per update" in note and "at most 3 updates old" in note


def test_flow_models_have_no_responses() -> None:
    with pytest.raises(UserError, match=r'requires a language model, but algorithm "flow-grpo"'):
        build.recipe("demo", ["partial=true", "lag=2"])

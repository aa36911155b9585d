"""vLLM in this process against the built-in sampler and the learner, with the same prompts and
weights: `make test-vllm`. What needs no vLLM is tested everywhere."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gesso import build, config, run
from gesso.samplers.base import Piece
from gesso.samplers.decode import DecodingSampler
from gesso.samplers.vllm import VllmSampler, one_token_per_image
from gesso.traces.tokens import TokenTrace
from gesso.types import Prompt, ResponseSpec, UserError
from gesso.weights.publish import Publication
from tests import tokens
from tests.samplers.test_decode import gap, joined
from tests.tokens import Tiny, stirred

HEAD = 32  # vLLM has no attention on a CPU for narrower heads
ROWS = [0, 0, 1, 1, 1, 2, 2, 0, 2]
SEEDS = list(range(100, 100 + len(ROWS)))
GREEDY, WARM = ResponseSpec(24, temperature=0.0), ResponseSpec(24, temperature=0.8)
SETTINGS = config.Sampler(batch=4, engine="vllm")
LORA = config.Lora(rank=4, alpha=12)
CLOSE = 1e-4  # greedy, without adapters, measured: 2e-7 to 4e-6
INSTALLED = importlib.util.find_spec("vllm") is not None


def needs_vllm(test: Callable[..., None]) -> Callable[..., None]:
    reason = "needs an environment with vLLM: make test-vllm"
    return pytest.mark.vllm(pytest.mark.skipif(not INSTALLED, reason=reason)(test))


@pytest.fixture(scope="module")
def of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    root = tmp_path_factory.mktemp("wide")

    def made(name: str) -> Tiny:
        if not (root / name).exists():
            tokens.build(name, root / name, HEAD)
        return Tiny(name, root / name)

    return made


def nudged(model: Any, seed: int = 3) -> Any:
    """Weights a little off, so that rounding stays as small as in a network one would train."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.policy.trainable.values():
        tensor.data += 0.05 * torch.randn(tensor.shape, generator=generator)
    return model


@dataclass
class Both:
    """A model, and the two samplers that draw from it."""

    tiny: Tiny
    model: Any
    vllm: VllmSampler

    def greedy(self, sampler: Any, weights: Any = "current") -> Piece[TokenTrace]:
        spec = ResponseSpec(GREEDY.max_tokens, 0.0, weights)
        return joined(list(sampler.sample(self.tiny.prompts, [0, 1, 2], [0, 0, 0], spec)))

    def warm(self) -> Piece[TokenTrace]:
        return joined(list(self.vllm.sample(self.tiny.prompts, ROWS, SEEDS, WARM)))

    def agree(self, weights: Any = "current") -> bool:
        """Whether both write the same greedy responses, with the same log-probs."""
        ours = self.greedy(DecodingSampler(self.model, 4), weights)
        other = self.greedy(self.vllm, weights)
        same = ours.trace.tokens.shape == other.trace.tokens.shape
        same = same and torch.equal(ours.trace.tokens, other.trace.tokens)
        return same and gap(ours.logp, other.logp) <= CLOSE


@pytest.fixture(scope="module", params=["qwen2", "llama", "qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
def both(request: pytest.FixtureRequest, of: Callable[[str], Tiny]) -> Iterator[Both]:
    tiny = of(request.param)
    model = tiny.model()
    sampler = VllmSampler(model, SETTINGS, longest=1000)
    yield Both(tiny, model, sampler)
    sampler.close()


@pytest.fixture
def adapted(of: Callable[[str], Tiny]) -> Iterator[Both]:
    tiny = of("qwen2")
    model = nudged(tiny.model(lora=LORA))
    sampler = VllmSampler(model, SETTINGS, longest=200)
    yield Both(tiny, model, sampler)
    sampler.close()


@needs_vllm
def test_greedy_responses_are_the_built_in_samplers(both: Both) -> None:
    ours, other = both.greedy(DecodingSampler(both.model, 4)), both.greedy(both.vllm)
    assert torch.equal(ours.trace.tokens, other.trace.tokens)
    assert torch.equal(ours.trace.mask, other.trace.mask)
    assert torch.equal(ours.trace.cut, other.trace.cut)
    assert [s.text for s in ours.samples] == [s.text for s in other.samples]
    assert gap(ours.logp, other.logp) <= CLOSE
    assert both.model.logp(other.trace, 0.0).logp[other.trace.mask].std() > 0.1


@needs_vllm
def test_log_probs_are_the_learners(both: Both) -> None:
    piece = both.warm()
    assert piece.index == list(range(len(ROWS))) and piece.logp.dtype == torch.float32
    found = both.model.logp(piece.trace, WARM.temperature).logp
    assert gap(found, piece.logp) <= CLOSE
    assert gap(both.model.logp(piece.trace, 1.0).logp, piece.logp) > 0.1
    drawn = piece.trace.tokens[piece.trace.mask]
    assert not torch.isin(drawn, both.model.suppressed).any()
    ended = torch.isin(drawn, torch.tensor(sorted(both.model.end)))
    assert int(ended.sum()) == int((~piece.trace.cut).sum())


@needs_vllm
def test_seeds_say_what_is_sampled(both: Both) -> None:
    first, again = both.warm(), both.warm()
    assert [s.text for s in first.samples] == [s.text for s in again.samples]
    assert [s.seed for s in first.samples] == SEEDS
    assert len({s.text for s in first.samples}) > len(ROWS) // 2
    pieces = list(both.vllm.sample(both.tiny.prompts, ROWS, SEEDS, WARM))
    assert len(pieces) > 1  # rewards start before the last response is written


@needs_vllm
def test_weights_follow_when_they_are_loaded(both: Both) -> None:
    policy = both.model.policy
    before = {name: tensor.clone() for name, tensor in policy.tensors().items()}
    try:
        assert both.agree()
        for tensor in policy.trainable.values():
            tensor.data *= 1.1
        assert not both.agree()  # the learner has moved on, the engine was not told
        both.vllm.accept(Publication(7, {"current": policy.tensors()}))
        assert both.agree() and both.vllm.weights.version == 7
    finally:
        both.vllm.accept(Publication(0, {"current": before}))
    assert both.agree()


@needs_vllm
def test_other_weights_of_the_policy(both: Both) -> None:
    policy = both.model.policy
    policy.snapshot("ema")
    for tensor in policy.copies["ema"].values():
        tensor *= 0.9
    assert both.agree("ema") and both.agree() and both.agree("ema")
    current = both.greedy(both.vllm)
    assert gap(current.logp, both.model.logp(current.trace, 0.0).logp) <= CLOSE
    assert gap(current.logp, both.model.logp(current.trace, 0.0, "ema").logp) > 0.01


@needs_vllm
def test_an_unfinished_call_leaves_nothing(both: Both) -> None:
    left = both.vllm.sample(both.tiny.prompts, ROWS, SEEDS, WARM)
    next(left)
    left.close()
    assert not both.vllm.engine.llm_engine.has_unfinished_requests()
    assert both.agree()


@needs_vllm
def test_a_large_image(both: Both) -> None:
    if not both.tiny.sees:
        pytest.skip("a model that only reads")
    large = Prompt("what?", images=(tokens.picture(176, 176),))
    model = both.model
    model.images.size["longest_edge"], kept = 2**20, model.images.size["longest_edge"]
    try:
        assert len(model.encode(large)) > 480
        (piece,) = both.vllm.sample([large], [0], [1], WARM)
        assert gap(model.logp(piece.trace, WARM.temperature).logp, piece.logp) <= CLOSE
    finally:
        model.images.size["longest_edge"] = kept


@needs_vllm
def test_adapters_are_folded_in(adapted: Both) -> None:
    assert adapted.agree() and adapted.agree("reference") and adapted.agree()
    piece = adapted.warm()
    assert gap(adapted.model.logp(piece.trace, WARM.temperature).logp, piece.logp) <= CLOSE
    base = adapted.model.logp(piece.trace, WARM.temperature, "reference").logp
    assert gap(base, piece.logp) > 0.1
    nudged(adapted.model, seed=4)
    assert not adapted.agree()
    adapted.vllm.accept(Publication(1, {"current": adapted.model.policy.tensors()}))
    assert adapted.agree()


@needs_vllm
def test_the_process_stays_as_it_was(of: Callable[[str], Tiny]) -> None:
    environment, threads = dict(os.environ), torch.set_num_threads
    VllmSampler(of("qwen2").model(), SETTINGS, longest=200).close()
    assert dict(os.environ) == environment and torch.set_num_threads is threads


@needs_vllm
def test_more_tokens_than_the_model_has_places(of: Callable[[str], Tiny]) -> None:
    with pytest.raises(UserError, match=r"= 1025, but vLLM accepts at most .* 1024 tokens"):
        VllmSampler(of("qwen2").model(), SETTINGS, longest=1025)


@needs_vllm
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_reward_rises(kind: str, of: Callable[[str], Tiny], tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("\n".join(f"question {word}?" for word in ("one", "two", "three")) + "\n")
    data: dict[str, Any] = {
        "steps": 12,
        "model": {"name": "causal", "path": str(of("qwen2").folder), "max_prompt": 64},
        "data": {"train": str(file), "eval": str(file), "groups": 3},
        "algorithm": {"name": "grpo", "group": 8, "max_tokens": 12},  # corrected by default
        "reward": [{"name": "tests.token_rewards:early"}],
        "optimizer": {"lr": 3e-3},
        "sampler": {"batch": 16, "engine": "vllm"},
        "eval": {"every": 0, "prompts": 3},
    }
    if kind == "lora":
        data["model"] |= {"lora": {"rank": 8, "alpha": 16}}
        data["optimizer"]["lr"] = 1e-2
    data["model"]["device"] = "cpu"
    found = run.train(build.recipe_from(data), folder=tmp_path / "run", quiet=True)
    rows = found.rows()[1:]
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3, rewards
    assert all(abs(row["update/importance"] - 1) <= CLOSE for row in rows)
    assert all(row["update/importance_bounded"] == 0 for row in rows)
    texts = run.load(tmp_path / "run").sample("question one?", n=2)  # without the engine
    assert len(texts) == 2


# Without vLLM


@pytest.mark.skipif(INSTALLED, reason="vLLM is installed here")
def test_vllm_is_missing(of: Callable[[str], Tiny], tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("hello\n")
    path = str(tmp_path / "x.txt")
    recipe = build.recipe_from(
        {
            "model": {"name": "causal", "path": str(of("qwen2").folder), "device": "cpu"},
            "data": {"train": path, "eval": path, "groups": 1},
            "algorithm": {"name": "grpo"},
            "reward": [{"name": "tests.token_rewards:early"}],
            "sampler": {"engine": "vllm"},
        }
    )
    with pytest.raises(UserError, match=r'pip install "gesso\[vllm\]"') as told:
        run.train(recipe, folder=tmp_path / "run", quiet=True)
    assert "\n" not in str(told.value) and not (tmp_path / "run").exists()


def test_recipes_that_cannot_be(recipe_data: dict) -> None:
    with pytest.raises(UserError, match=r'engine = "vllm" is for language models.* a flow model'):
        build.recipe_from(recipe_data | {"sampler": {"engine": "vllm"}})
    with pytest.raises(UserError, match='requires engine = "vllm"'):
        build.recipe_from(recipe_data | {"sampler": {"vllm": {"gpu_memory": 0.5}}})
    model = {"name": "causal", "path": "x", "quantize": "nf4", "lora": {"rank": 4}}
    writes = recipe_data | {"model": model, "algorithm": {"name": "grpo", "group": 3}}
    with pytest.raises(UserError, match="needs unquantized weights"):
        build.recipe_from(writes | {"sampler": {"engine": "vllm"}})


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_plain_weights_are_those_of_a_merged_export(
    lora: config.Lora | None, of: Callable[[str], Tiny], tmp_path: Path
) -> None:
    tiny = of("qwen2.5-vl")
    model = stirred(tiny.model(lora=lora))
    model.save(tmp_path / "whole", merged=True)
    saved = tiny.plain(tmp_path / "whole").state_dict()
    with model.policy.plain("current") as tensors:
        found = dict(tensors)
    assert found.keys() == saved.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in found.items())
    if lora is not None:
        base = tiny.plain().state_dict()
        with model.policy.plain("reference") as tensors:
            off = dict(tensors)
        assert off.keys() == base.keys() and all(torch.equal(base[n], t) for n, t in off.items())


def test_one_place_for_each_image(of: Callable[[str], Tiny]) -> None:
    tiny = of("qwen2.5-vl")
    model = tiny.model()
    place = model.module.config.image_token_id
    for asked, pictures in zip(tiny.prompts[1:], (1, 2), strict=True):
        encoded = model.encode(asked)
        short = one_token_per_image(encoded, model.images.merge_size)
        assert short.tolist().count(place) == pictures < int(encoded.kinds.sum())
        text = encoded.ids[encoded.kinds == 0]
        assert torch.equal(short[short != place], text)

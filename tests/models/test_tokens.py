"""Every model that writes against plain transformers: tiny random weights of the real classes, on
disk."""

from __future__ import annotations

import gc
import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gesso.cluster.exchanging import Exchanging, Request
from gesso.config import Lora
from gesso.models.tokens import attention, feature_cache, transformer
from gesso.models.tokens import head as heads
from gesso.models.tokens.feature_cache import FeatureCache
from gesso.models.tokens.packing import pack, pack_responses
from gesso.models.tokens.vision_language import VisionLanguage
from gesso.ranks import Group
from gesso.samplers.base import Piece
from gesso.samplers.responses import EncodedPrompts
from gesso.traces.tokens import TokenPrompt, TokenTrace
from gesso.types import Prompt, PromptImage, ResponseSpec, Sample, UserError
from tests import tokens
from tests.tokens import Tiny, padded_logits, padded_logp, picture, stirred, trace_of
from tests.typed import sure

ROWS = [0, 1, 1, 2, 0]
LORA = Lora(rank=4, alpha=12)
# Adapters do not depend on the model: one that reads text, one that sees.
TRAINED = [(name, None) for name in tokens.BUILDERS] + [("qwen2", LORA), ("qwen3-vl", LORA)]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokens")
    for name in tokens.BUILDERS:
        tokens.build(name, root / name)
    return root


@pytest.fixture(params=tokens.BUILDERS)
def tiny(request: pytest.FixtureRequest, folders: Path) -> Tiny:
    return Tiny(request.param, folders / request.param)


@pytest.fixture(params=tokens.SEEING)
def seeing(request: pytest.FixtureRequest, folders: Path) -> Tiny:
    return Tiny(request.param, folders / request.param)


@pytest.fixture
def of(folders: Path) -> Any:
    return lambda name: Tiny(name, folders / name)


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().abs().max())


# The packed pass is the padded one


@torch.no_grad()
def test_packed_is_padded(tiny: Tiny) -> None:
    """Responses of different lengths to prompts without, with one and with two pictures at once."""
    model, plain = tiny.unchanged(), tiny.plain_unchanged()
    trace = trace_of(model, tiny.prompts, ROWS)
    for temperature in (1.0, 0.7):
        found = model.logp(trace, temperature)
        expected = padded_logp(plain, trace, temperature, model.suppressed)
        assert found.logp.dtype == torch.float32 and found.logp.shape == trace.tokens.shape
        assert gap(found.logp, expected) <= 1e-5
        assert found.logp[trace.mask].std() > 0.3  # not trivially equal
        logits = padded_logits(plain, trace, 0) / temperature
        shares = logits.index_fill(-1, model.suppressed, float("-inf")).softmax(-1)
        entropy = torch.special.entr(shares).sum(-1).masked_fill(~trace.mask, 0)
        assert gap(found.entropy, entropy) <= 1e-5
    greedy = model.logp(trace, 0.0)
    assert torch.equal(greedy.logp, model.logp(trace, 1.0).logp)


@torch.no_grad()
def test_a_vision_language_model_reads_text_alone(seeing: Tiny) -> None:
    model = seeing.model()
    trace = trace_of(model, tokens.prompts(sees=False), ROWS)
    expected = padded_logp(seeing.plain_unchanged(), trace, 0.7, model.suppressed)
    assert gap(model.logp(trace, 0.7).logp, expected) <= 1e-5 and model.encoded_images == 0


def gradient(logp: torch.Tensor, of: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Of a weighted sum, so that every response token counts by itself."""
    weight = torch.arange(1.0, logp.numel() + 1).view_as(logp).sin()
    (logp * weight).sum().backward()
    return {name: p.grad for name, p in of.items() if p.grad is not None}


def assert_same_gradient(found: dict, expected: dict, most: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    assert largest > 0.1
    for name, g in expected.items():
        assert gap(found[name], g) <= most * largest, name


def test_packed_gradients_are_padded_gradients(tiny: Tiny) -> None:
    model, plain = tiny.model(), tiny.plain()
    trace = trace_of(model, tiny.prompts, ROWS)
    out = model.logp(trace, 0.7)
    assert not out.entropy.requires_grad
    found = gradient(out.logp, model.policy.trainable)
    every = {n: p for n, p in plain.named_parameters() if "visual" not in n}
    expected = gradient(padded_logp(plain, trace, 0.7, model.suppressed), every)
    assert_same_gradient(found, expected)


@torch.no_grad()
def test_neighbours_do_not_leak(tiny: Tiny) -> None:
    """transformers' own packing does, silently, when it is given three rows of positions."""
    model = tiny.unchanged()
    trace = trace_of(model, tiny.prompts, ROWS)
    first = model.logp(trace, 1.0).logp
    for changed in range(len(ROWS)):
        other = trace.tokens.clone()
        other[changed] = (other[changed] + 7) % len(tokens.LETTERS)
        second = model.logp(replace(trace, tokens=other), 1.0).logp
        rest = [i for i in range(len(ROWS)) if i != changed]
        assert gap(first[rest], second[rest]) <= 1e-6
        assert gap(first[changed], second[changed]) > 1e-2
    order = torch.tensor([3, 1, 4, 0, 2])
    assert gap(model.logp(trace.rows(order), 1.0).logp, first[order]) <= 1e-5
    alone = [model.logp(trace.rows(torch.tensor([i])), 1.0).logp[0] for i in range(len(ROWS))]
    assert gap(torch.stack(alone), first) <= 1e-5


@torch.no_grad()
def test_every_image_matters_where_it_is(seeing: Tiny) -> None:
    model = seeing.unchanged()
    trace = trace_of(model, seeing.prompts, ROWS)
    first = model.logp(trace, 1.0).logp
    prompt = seeing.prompts[2]
    swapped = replace(prompt, images=(prompt.images[0], picture(48, 16, 9)))
    other = [*trace.prompts[:2], model.encode(swapped)]
    second = model.logp(replace(trace, prompts=other), 1.0).logp
    assert torch.equal(trace.row, torch.tensor(ROWS)) and gap(first[3], second[3]) > 1e-2
    assert gap(first[[0, 1, 2, 4]], second[[0, 1, 2, 4]]) <= 1e-6


def test_places_in_time_height_and_width(seeing: Tiny) -> None:
    model = seeing.unchanged()
    prompt = model.encode(seeing.prompts[1])  # one picture of 8 × 12 patches: 4 × 6 places
    places = model._positions(prompt)
    start = int(prompt.kinds.argmax())
    assert places[:, :start].tolist() == [list(range(start))] * 3
    height, width = places[1:, start : start + 24]
    assert height.tolist() == [start + i // 6 for i in range(24)]
    assert width.tolist() == [start + i % 6 for i in range(24)]
    assert places[:, start + 24].tolist() == [start + 6] * 3  # text goes on behind the wider side
    packed = model._sequences([prompt], [[torch.zeros(3, dtype=torch.long)]])
    following = int(places.max()) + 1
    assert packed.positions[:, -3:].tolist() == [[following, following + 1, following + 2]] * 3


def test_positions_are_computed_once_per_prompt(
    seeing: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sure(VisionLanguage, seeing.unchanged())
    trace = trace_of(model, seeing.prompts, ROWS)
    counted = Mock(wraps=model.module.model.get_rope_index)
    monkeypatch.setattr(model.module.model, "get_rope_index", counted)
    first, second = (model.logp(trace, 1.0).logp for _ in range(2))
    assert torch.equal(first, second) and counted.call_count == len(seeing.prompts)
    assert len(model._known_positions) == len(seeing.prompts)
    del trace
    gc.collect()
    assert not model._known_positions


def test_an_empty_row_has_no_log_prob(of: Any) -> None:
    model = of("qwen2").unchanged()
    trace = trace_of(model, of("qwen2").prompts, ROWS)
    mask = trace.mask.clone()
    mask[1] = False
    with torch.no_grad():
        found = model.logp(replace(trace, mask=mask), 1.0).logp
        assert not found[1].any()
        rest = [0, 2, 3, 4]
        assert gap(found[rest], model.logp(trace, 1.0).logp[rest]) <= 1e-5
        nothing = model.logp(replace(trace, mask=torch.zeros_like(mask)), 1.0)
    assert not nothing.logp.any() and not nothing.entropy.any()


@torch.no_grad()
def test_suppressed_ids_have_no_probability(tiny: Tiny) -> None:
    model = tiny.unchanged()
    own = {tiny.unchanged().tokenizer.convert_tokens_to_ids(t) for t in tokens.VISION}
    size = model.module.get_output_embeddings().weight.shape[0]
    padding = set(range(size - tokens.PADDED, size))
    assert set(model.suppressed.tolist()) == padding | (own if tiny.sees else set())
    prompt = [model.encode(tiny.prompts[0])]
    every = torch.arange(size)[:, None]
    mask, cut = torch.ones_like(every, dtype=torch.bool), torch.zeros(size, dtype=torch.bool)
    found = model.logp(TokenTrace(prompt, torch.zeros(size).long(), every, mask, cut), 1.3)
    assert float(found.logp.exp().sum()) == pytest.approx(1, abs=1e-5)
    assert (found.logp[:, 0] == -torch.inf).nonzero()[:, 0].tolist() == model.suppressed.tolist()
    assert torch.isfinite(found.entropy).all() and gap(found.entropy, found.entropy[0, 0]) <= 1e-5


def test_states_of_a_critic(of: Any) -> None:
    model = of("qwen3-vl").model(lora=LORA)
    trace = trace_of(model, of("qwen3-vl").prompts, ROWS)
    states = model.hidden(trace)
    assert states.shape == (*trace.tokens.shape, 32) and states.requires_grad
    logits = model.logits(states, 0.7)
    logp = logits.log_softmax(-1).gather(-1, trace.tokens[..., None])[..., 0]
    found = logp.masked_fill(~trace.mask, 0)
    assert gap(found, model.logp(trace, 0.7).logp) <= 1e-5
    assert not states[~trace.mask].any()


# The head


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_full_logits_never_exist(of: Any, lora: Lora | None, monkeypatch: Any) -> None:
    tiny = of("qwen2.5-vl")
    model = stirred(tiny.model(lora=lora)) if lora else tiny.model()
    trace = trace_of(model, tiny.prompts, ROWS)
    responses = int(trace.mask.sum())
    expected = gradient(model.logp(trace, 0.7).logp, model.policy.trainable)
    for p in model.policy.trainable.values():
        p.grad = None
    sizes: list[int] = []
    head = model.module.get_output_embeddings()
    head.register_forward_hook(lambda _, __, out: sizes.append(out.shape[0]))
    monkeypatch.setattr("gesso.models.tokens.head.LOGITS", 4 * head.weight.shape[0])
    found = gradient(model.logp(trace, 0.7).logp, model.policy.trainable)
    passes = 2 if lora is None else 1  # a frozen head's gradient is known with its logits
    assert max(sizes) == 4 and sum(sizes) == passes * responses
    assert_same_gradient(found, expected)
    sizes.clear()
    with torch.no_grad():
        model.logp(trace, 0.7)
    assert max(sizes) == 4 and sum(sizes) == responses


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_a_frozen_heads_gradient(temperature: float) -> None:
    """Against autograd through all logits; a log-prob's own factor reaches it, an id that is not
    allowed has no share."""
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(8, 30, bias=False).requires_grad_(False)
    states = torch.randn(11, 8, generator=generator).requires_grad_()
    tokens = torch.randint(0, 27, (11,), generator=generator)
    factor = torch.randn(11, generator=generator)
    allowed = torch.arange(30) < 27
    logits = (head(states) / (temperature or 1.0))[:, :27]
    plain = logits.log_softmax(-1)
    expected = torch.autograd.grad((plain[range(11), tokens] * factor).sum(), states)[0]
    logp, entropy = heads.FrozenHead.apply(states, head, tokens, temperature, allowed, 4)
    found = torch.autograd.grad((logp * factor).sum(), states)[0]
    assert gap(logp, plain[range(11), tokens]) <= 1e-6
    assert gap(entropy, -(plain.exp() * plain).sum(-1)) <= 1e-6 and not entropy.requires_grad
    assert gap(found, expected) <= 1e-6


class Products(TorchDispatchMode):
    """How many there were."""

    count = 0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten.mm.default
        return function(*args, **(kwargs or {}))


def test_a_frozen_head_that_is_not_differentiated_is_one_product() -> None:
    head = torch.nn.Linear(8, 30, bias=False).requires_grad_(False)
    tokens, allowed = torch.zeros(11, dtype=torch.long), torch.ones(30, dtype=torch.bool)
    for asked in (True, False):
        states = torch.ones(11, 8, requires_grad=asked)
        with Products() as products:
            heads.score(head, states, tokens, 1.0, allowed)
        assert products.count == 1 + asked


# Training


def dense(q: Any, k: Any, v: Any, queries: Any, keys: Any, *rest: Any) -> torch.Tensor:
    """What flash attention of segments promises, by one large product."""
    most_queries, most_keys, causal, scaling = rest
    assert int(queries.diff().max()) <= most_queries and int(keys.diff().max()) <= most_keys
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16  # the kernel takes nothing else
    assert not causal or len(queries) % attention.SEGMENTS == 0
    places = [torch.arange(int(ends[-1])) for ends in (queries, keys)]
    ends = queries[1:], keys[1:]
    of = [torch.bucketize(p, e, right=True) for p, e in zip(places, ends, strict=True)]
    left = [e[o] - p for p, e, o in zip(places, ends, of, strict=True)]
    seen = (of[0][:, None] == of[1]) & ((left[1] >= left[0][:, None]) | (not causal))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    q, k, v = (t.transpose(0, 1)[None].float() for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling)
    return out[0].transpose(0, 1).bfloat16()


def test_segments_laid_flat(monkeypatch: Any) -> None:
    """Against one by one; a response of no tokens takes no keys. Lengths are rounded up, each kind
    by itself: longer ones than the kernel is told of it would not look at."""
    trees = [[200, 100, 0, 30], [12]]
    flat = attention.Flat.of(trees, torch.device("cpu"), torch.bfloat16)
    assert (flat.most_queries, flat.most_keys) == (256, 512)
    assert len(flat.repeats.tokens) == 200 + 300 + 230 + 12
    noise = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 342, 8, generator=noise).bfloat16() for h in (4, 2, 2))
    monkeypatch.setattr(attention, "_flash", dense)
    found = flat.attend(q, k, v, 0.3)
    groups = attention.Groups.of(trees, torch.device("cpu"))
    expected = groups.attend(q.float(), k.float(), v.float(), 0.3)
    assert found.shape == expected.shape and gap(found.float(), expected) <= 0.02


def test_segments_in_groups() -> None:
    """Against every token by itself, with gradients. Prompts of 12 and 9 tokens go together; of the
    responses to the first one, those of 3 and 2; nobody looks at what fills up the shorter ones,
    and nothing beyond the last token is there to fill with."""
    trees = [[12, 3, 0, 5, 2], [9, 1], [9]]
    groups = attention.Groups.of(trees, torch.device("cpu"))
    assert sorted(groups.shapes) == [(1, 1, 10), (1, 5, 17), (2, 3, 15), (3, 12, 12)]
    noise = torch.Generator().manual_seed(0)
    tokens = sum(map(sum, trees))
    inputs = [
        torch.randn(1, h, tokens, 8, generator=noise, dtype=torch.float64).requires_grad_()
        for h in (4, 2, 2)
    ]
    q, k, v = inputs
    rows, start = [], 0
    for tree in trees:
        first = start
        for i, length in enumerate(tree):
            for at in range(start, start + length):
                past = list(range(first, first + tree[0])) if i else []
                seen = past + list(range(start, at + 1))
                scores = 0.3 * q[0, :, at, None] @ k[0].repeat_interleave(2, 0)[:, seen].mT
                rows.append((scores.softmax(-1) @ v[0].repeat_interleave(2, 0)[:, seen])[:, 0])
            start += length
    expected, found = torch.stack(rows)[None], groups.attend(q, k, v, 0.3)
    weight = torch.randn(expected.shape, generator=noise, dtype=torch.float64)
    slopes = [torch.autograd.grad((out * weight).sum(), inputs) for out in (found, expected)]
    assert found.shape == expected.shape and gap(found, expected) <= 1e-12
    assert all(gap(a, b) <= 1e-12 for a, b in zip(*slopes, strict=True))


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_all_segments_at_once(seeing: Tiny, lora: Lora | None, monkeypatch: Any) -> None:
    """The way of CUDA: prompts, responses and windows of pictures in one call each, the same as one
    by one; pictures look together."""
    one_by_one = seeing.model(dtype="bfloat16", lora=lora)
    trace = trace_of(one_by_one, seeing.prompts, ROWS)
    expected = one_by_one.logp(trace, 1.0).logp
    model = seeing.model(dtype="bfloat16", lora=lora, fold=lora is not None or None)

    monkeypatch.setattr(attention, "_flash", dense)
    monkeypatch.setattr(transformer, "segments_of", attention.Flat.of)
    model._pays = lambda *_: True
    looks: list[int] = []
    look = model._run_tower

    def counted(pixels: Any, grids: Any) -> Any:
        looks.append(len(grids))
        return look(pixels, grids)

    model._run_tower = counted
    found = model.logp(trace, 1.0).logp
    assert looks == [3]
    error = (found - expected).detach().abs()
    assert float(error.sum() / trace.mask.sum()) <= 0.03 and float(error.max()) <= 0.25
    with torch.no_grad(), model.policy.folded(), model.generating("current")():
        model.prefill(trace.prompts[:2])  # through a cache, which mixes precisions


@pytest.mark.parametrize("name, lora", TRAINED)
def test_checkpointing_gives_the_same_gradient(of: Any, name: str, lora: Lora | None) -> None:
    tiny = of(name)
    kept, again = tiny.model(lora=lora), tiny.model(lora=lora, gradient_checkpointing=True)
    if lora is not None:
        stirred(kept), stirred(again)
    trace = trace_of(kept, tiny.prompts, ROWS)
    expected = gradient(kept.logp(trace, 1.0).logp, kept.policy.trainable)
    calls: list[bool] = []
    # The MLP's hook: transformers 5.23 recomputes a layer's forward without the layer's own hooks.
    again.decoder.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(True))
    logp = again.logp(trace, 1.0).logp
    assert len(calls) == 1
    found = gradient(logp, again.policy.trainable)
    assert len(calls) == 2
    assert_same_gradient(found, expected)
    assert not any(part.training for part in again.module.modules())


@torch.no_grad()
def test_adapters_are_in_the_decoder_and_off_for_the_reference(tiny: Tiny) -> None:
    base, model = tiny.unchanged(), tiny.model(lora=LORA)
    trace = trace_of(model, tiny.prompts, ROWS)
    names = {name.split(".lora_")[0] for name in model.policy.trainable}
    own = {name for name, _ in model.module.named_modules()}
    prefix = "model.language_model.layers." if tiny.sees else "model.layers."
    assert names <= own and all(name.startswith(prefix) for name in names)
    assert len(names) == model.decoder.config.num_hidden_layers * 7  # projections
    before = model.logp(trace, 1.0).logp
    assert torch.equal(before, base.logp(trace, 1.0).logp)
    model.policy.snapshot("old")
    stirred(model)
    after = model.logp(trace, 1.0).logp
    assert gap(after, before) > 0.1
    assert torch.equal(model.logp(trace, 1.0, "reference").logp, before)
    assert torch.equal(model.logp(trace, 1.0, "old").logp, before)
    assert torch.equal(model.logp(trace, 1.0).logp, after)


@torch.no_grad()
def test_the_reference_of_a_full_fine_tune_is_a_copy(of: Any) -> None:
    model = of("qwen2.5-vl").model()
    trace = trace_of(model, of("qwen2.5-vl").prompts, ROWS)
    before = model.logp(trace, 1.0).logp
    model.policy.snapshot("reference")
    stirred(model)
    assert gap(model.logp(trace, 1.0).logp, before) > 0.1
    assert torch.equal(model.logp(trace, 1.0, "reference").logp, before)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_the_tower_is_trained_on_request(seeing: Tiny, lora: Lora | None) -> None:
    frozen, model = seeing.model(lora=lora), seeing.model(lora=lora, train_vision=True)
    assert not any("visual" in name for name in frozen.policy.trainable)
    if lora is not None:
        stirred(model)
    trace = trace_of(model, seeing.prompts, ROWS)
    found = gradient(model.logp(trace, 1.0).logp, model.policy.trainable)
    in_tower = [g for name, g in found.items() if "visual" in name]
    assert in_tower and max(float(g.abs().max()) for g in in_tower) > 1e-3
    assert model.encoded_images == 3
    with torch.no_grad():
        model.logp(trace, 1.0)
    assert model.encoded_images == 6  # its features change with it
    if lora is None:
        plain = seeing.plain()
        every = dict(plain.named_parameters())
        padded = padded_logp(plain, trace, 1.0, model.suppressed)
        assert_same_gradient(found, gradient(padded, every))
        return
    linear = {
        n for n, m in seeing.plain_unchanged().named_modules() if isinstance(m, torch.nn.Linear)
    }
    adapted = {name.split(".lora_")[0] for name in model.policy.trainable}
    assert adapted == linear - {"lm_head"}


def test_a_frozen_tower_encodes_each_image_once(seeing: Tiny) -> None:
    model = seeing.model(lora=LORA)
    trace = trace_of(model, seeing.prompts, ROWS)
    model.logp(trace, 1.0).logp.sum().backward()
    with torch.no_grad():
        model.logp(trace, 1.0, "reference")
        again = replace(trace, prompts=[model.encode(p) for p in seeing.prompts])
        model.logp(again.rows(torch.tensor([3, 1])), 1.0)
    assert model.encoded_images == 3


def test_ranks_send_each_other_prompts_and_features_of_images(
    seeing: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers; the first one has sampled three responses. The other one encodes neither their
    prompts nor the images."""
    worker, other = Exchanging(), Exchanging()
    sent: list[Any] = []
    for rank, each in enumerate((worker, other)):
        each.model, each.pieces = seeing.model(lora=LORA), {}
        shared = EncodedPrompts(each.model, seeing.prompts)
        spec = ResponseSpec(max_tokens=5)
        each.requests = {"k": Request(0, seeing.prompts, ROWS, [0] * 5, spec, shared=shared)}
        each.group = cast(Group, _Passing(rank, sent))
    trace = trace_of(worker.model, seeing.prompts, ROWS)
    logp = worker.model.logp(trace, 1.0).logp
    for i in range(3):
        one = torch.tensor([i])
        sample = Sample(seeing.prompts[ROWS[i]], None, 0, "text", 1)
        worker.pieces[f"k/{i}"] = Piece([i], [sample], trace.rows(one), logp[one].detach())
    names = [f"k/{i}" for i in range(3)]
    worker.share(names, [0] * 3)
    assert len(sent) == 1  # together
    monkeypatch.setattr(other.model, "encode", lambda prompt: pytest.fail("encoded again"))
    other.share(names, [0] * 3)
    held = [other.pieces[name] for name in names]
    found = other.model.logp(TokenTrace.concat([piece.trace for piece in held]), 1.0).logp
    assert gap(found, logp[:3]) < 1e-5 and other.model.encoded_images == 0


@dataclass
class _Passing:
    """A group of two; the second one receives what the first one has sent."""

    rank: int
    log: list[Any]
    count = 2
    sent = 0

    def gather(self, values: Any, about: Any) -> Any:
        self.log += [(dict(values), about)] if self.rank == 0 else []
        return [self.log[-1], ({}, [])]


def test_the_least_recently_used_images_are_forgotten() -> None:
    made: list[int] = []

    def see(number: int) -> torch.Tensor:
        def look() -> torch.Tensor:
            made.append(number)
            return torch.full((4,), float(number))

        return seen.features(bytes([number]), look)

    seen = FeatureCache(limit=2 * 16)
    for number in (1, 2, 1, 3, 1, 2):
        assert see(number)[0] == number
    assert made == [1, 2, 3, 2]


def test_an_image_is_known_by_its_patches_and_their_shape() -> None:
    ids, pixels = torch.zeros(1, dtype=torch.long), torch.zeros(4, 3)
    seen = FeatureCache()

    def keys(pixels: torch.Tensor, *grid: list[int]) -> list[bytes]:
        return seen.keys(TokenPrompt(ids, ids, pixels, torch.tensor(grid)))

    flat, tall = keys(pixels, [1, 2, 1], [1, 1, 2])
    assert flat != tall
    assert keys(pixels.clone(), [1, 2, 1], [1, 2, 1]) == [flat, flat]
    assert keys(pixels + 1, [1, 2, 1], [1, 2, 1])[0] != flat


def test_images_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, grid = torch.zeros(1, dtype=torch.long), torch.tensor([[1, 2, 1]])
    prompts = [TokenPrompt(ids, ids, torch.full((2, 3), float(i)), grid) for i in range(3)]
    seen = FeatureCache()
    hashed = Mock(wraps=feature_cache._digest)
    monkeypatch.setattr(feature_cache, "_digest", hashed)
    seen.hash_new(prompts[:2])
    assert hashed.call_count == 2
    threads = Mock(side_effect=AssertionError("nothing is new"))
    monkeypatch.setattr(feature_cache, "ThreadPoolExecutor", threads)
    seen.hash_new(prompts[:2])
    assert len({key for prompt in prompts for key in seen.keys(prompt)}) == 3
    assert hashed.call_count == 3


# Measured here: .02 to .14, for these tiny models' logits are large.
BFLOAT16_GAP = 0.3


@pytest.mark.parametrize("name, lora", TRAINED)
def test_bfloat16(of: Any, name: str, lora: Lora | None) -> None:
    tiny = of(name)
    model, exact = tiny.model(dtype="bfloat16", lora=lora), tiny.unchanged()
    trained = {p.dtype for p in model.policy.trainable.values()}
    rest = {p.dtype for n, p in model.module.named_parameters() if n not in model.policy.trainable}
    assert trained == {torch.float32} and rest <= {torch.bfloat16}
    seen: set[torch.dtype] = set()
    for layer in model.decoder.layers:
        layer.mlp.down_proj.register_forward_hook(lambda _, __, out: seen.add(out.dtype))
    trace = trace_of(model, tiny.prompts, ROWS)
    logp = model.logp(trace, 1.0).logp
    assert logp.dtype == torch.float32 and seen == {torch.bfloat16}
    assert 1e-5 < gap(logp, exact.logp(trace, 1.0).logp) < BFLOAT16_GAP
    assert {g.dtype for g in gradient(logp, model.policy.trainable).values()} == {torch.float32}


# Text and pictures in


class _Processors:
    """transformers' own, without their part for videos, which would need torchvision."""

    @staticmethod
    def of(name: str, images: Any, tokenizer: Any) -> Any:
        import transformers

        names = {"qwen2-vl": "Qwen2VLProcessor", "qwen2.5-vl": "Qwen2_5_VLProcessor"}
        kind = getattr(transformers, names.get(name, "Qwen3VLProcessor"))

        class Still(kind):  # type: ignore[misc, valid-type]
            def __init__(self, image_processor: Any = None, tokenizer: Any = None) -> None:
                self.image_token, self.video_token = tokens.VISION[2:]
                self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(
                    tokens.VISION[2:]
                )
                transformers.ProcessorMixin.__init__(self, image_processor, tokenizer)

        return Still(images, tokenizer)


def test_prompts_are_encoded_as_the_processor_does(seeing: Tiny) -> None:
    model = seeing.model()
    processor = _Processors.of(seeing.name, model.images, model.tokenizer)
    for prompt in seeing.prompts:
        parts = [{"type": "image"} for _ in prompt.images] + [{"type": "text", "text": prompt.text}]
        messages = list(prompt.messages) or [{"role": "user", "content": parts}]
        text = model.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        images = [p.open() for p in prompt.images] or None
        theirs = processor(text=[text], images=images, return_tensors="pt")
        ours = model.encode(prompt)
        assert torch.equal(ours.ids, theirs["input_ids"][0])
        assert torch.equal(ours.kinds, theirs["mm_token_type_ids"][0])
        if images:
            assert torch.equal(ours.pixels, theirs["pixel_values"])
            assert torch.equal(ours.grid, theirs["image_grid_thw"])


def test_text_in_and_out(tiny: Tiny) -> None:
    model = tiny.unchanged()
    prompt = model.encode(Prompt("how many?"))
    shown = model.tokenizer.decode(prompt.ids)
    assert shown == "<|im_start|>user\nhow many?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.pixels is None and not prompt.kinds.any()
    response = model.tokenizer("two dots.").input_ids
    ends = [model.tokenizer.convert_tokens_to_ids(t) for t in (tokens.END, tokens.STOP)]
    assert model.decode([*response, ends[0]]) == "two dots." and model.end == set(ends)


def test_lengths_without_reading_pixels(tiny: Tiny, monkeypatch: Any) -> None:
    model = tiny.unchanged()
    expected = [len(model.encode(prompt)) for prompt in tiny.prompts]
    monkeypatch.setattr(PromptImage, "open", None)
    assert [model.length(prompt) for prompt in tiny.prompts] == expected
    if tiny.sees:
        with pytest.raises(UserError, match="d:4: an image cannot be used"):
            model.length(Prompt("?", images=(PromptImage("no.png"),), where="d:4"))


def test_sizes_of_images(of: Any) -> None:
    tiny = of("qwen2.5-vl")
    prompt = Prompt("?", images=(picture(64, 64),))
    sizes = {}
    for name, limits in {"own": {}, "small": {"max_pixels": 256}, "big": {"min_pixels": 8192,
                         "max_pixels": 16384}}.items():  # fmt: skip
        sizes[name] = tiny.model(**limits).encode(prompt).grid.tolist()
    assert sizes == {"own": [[1, 16, 16]], "small": [[1, 4, 4]], "big": [[1, 24, 24]]}


@pytest.mark.parametrize(
    "name, prompt, told",
    [
        (
            "qwen2",
            Prompt("?", images=(PromptImage("a.png"),), where="d:3"),
            "d:3: got an image, but Qwen",
        ),
        (
            "qwen2.5-vl",
            Prompt("?", images=(PromptImage("no.png"),), where="d:4"),
            "d:4: an image can",
        ),
        ("qwen3-vl", Prompt("<|image_pad|>", where="d:5"), "d:5: got 0 images, but 1 image place"),
        (
            "qwen2-vl",
            Prompt("?", images=(picture(8, 8),), messages=({"role": "user", "content": "?"},)),
            "got 1 images, but 0 image placeholders",
        ),
        (
            "llama",
            Prompt("?", messages=({"role": "user", "content": [{"type": "image"}]},), where="d:6"),
            'd:6: a message contains a part of type "image"',
        ),
    ],
)
def test_prompts_that_cannot_be_used(of: Any, name: str, prompt: Prompt, told: str) -> None:
    with pytest.raises(UserError, match=told):
        of(name).unchanged().encode(prompt)


# Folders in and out


def broken(folder: Path, target: Path, **changes: Any) -> Path:
    """The folder again with another config."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    own = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(own | changes))
    return target


def test_folders_that_cannot_be_used(of: Any, tmp_path: Path) -> None:
    def told(tiny: Tiny, match: str, **settings: Any) -> None:
        with pytest.raises(UserError, match=match):
            tiny.model(**settings)

    text, sees = of("qwen2"), of("qwen2.5-vl")
    told(
        replace(text, folder=tmp_path / "none"),
        "expected a transformers model folder .* does not exist",
    )
    told(replace(text, folder=tmp_path), "the folder does not contain it")
    told(replace(text, folder=sees.folder), 'is a qwen2_5_vl.*model.name = "vision-language"')
    told(replace(sees, folder=text.folder), 'is a qwen2, expected.*model.name = "causal"')
    told(text, "requires a CUDA device", quantize="nf4", lora=LORA)
    told(text, "matches no module of Qwen2ForCausalLM", lora=Lora(targets=["to_q"]))
    told(sees, "matches no module", lora=Lora(targets=["qkv"]))  # the tower's alone
    base = broken(text.folder, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    told(replace(text, folder=base), "no chat template, so it is a base model; use its -Instruct")
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    types = {"layer_types": ["sliding_attention"] * 2}
    windows = broken(text.folder, tmp_path / "windows", **window, **types)
    told(replace(text, folder=windows), "sliding-window attention")
    deeper = broken(of("llama").folder, tmp_path / "deeper", num_hidden_layers=3)
    told(replace(text, folder=deeper), "9 weights of LlamaForCausalLM are missing")
    (base / "config.json").write_text("{")
    told(replace(text, folder=base), "config.json cannot be read")
    torn = broken(text.folder, tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:9999])
    told(replace(text, folder=torn), "cannot load it with AutoModelForCausalLM: Error while")
    mute = broken(text.folder, tmp_path / "mute")
    for file in mute.glob("tokenizer*"):
        file.unlink()
    told(replace(text, folder=mute), r"has no vocabulary; is tokenizer\.json missing\?")


def test_shapes_without_weights(tiny: Tiny) -> None:
    model = tiny.model(device="meta", lora=LORA)
    assert {p.device.type for p in model.module.parameters()} == {"meta"}
    assert model.policy.size == tiny.model(lora=LORA).policy.size


@torch.no_grad()
def same_as_plain(model: Any, plain: Any, trace: TokenTrace) -> float:
    expected = padded_logp(plain, trace, 1.0, model.suppressed)
    return gap(model.logp(trace, 1.0).logp, expected)


def test_an_adapter_for_peft(tiny: Tiny, tmp_path: Path) -> None:
    from peft import PeftModel

    model = stirred(tiny.model(lora=LORA))
    trace = trace_of(model, tiny.prompts, ROWS)
    model.save(tmp_path)
    assert {f.name for f in tmp_path.iterdir()} >= {"adapter_config.json"}
    assert not (tmp_path / "model.safetensors").exists()
    plain = PeftModel.from_pretrained(tiny.plain(), str(tmp_path))
    assert (
        same_as_plain(model, plain, trace) <= 2e-5
    )  # two ways of rounding: a prompt is passed once here, once a response there
    again = tiny.model(lora=replace_path(tmp_path))
    with torch.no_grad():
        assert torch.equal(again.logp(trace, 1.0).logp, model.logp(trace, 1.0).logp)


@pytest.mark.parametrize("name", ["qwen2", "qwen2.5-vl"])
def test_an_adapter_that_does_not_fit(of: Any, name: str, tmp_path: Path) -> None:
    tiny = of(name)
    tiny.model(lora=LORA).save(tmp_path)
    other = {"rank 4": Lora(rank=8, alpha=12), "alpha 12": Lora(rank=4, alpha=8)}
    for told, lora in other.items():
        with pytest.raises(UserError, match=told):
            tiny.model(lora=lora.model_copy(update={"path": str(tmp_path)}))
    with pytest.raises(UserError, match="which the recipe does not train"):
        tiny.model(lora=Lora(rank=4, alpha=12, targets=["q_proj"], path=str(tmp_path)))
    with pytest.raises(UserError, match="expected a PEFT adapter folder"):
        tiny.model(lora=Lora(rank=4, alpha=12, path=str(tmp_path / "none")))


def replace_path(path: Path) -> Lora:
    return LORA.model_copy(update={"path": str(path)})


def names_in(folder: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "merged"])
def test_a_folder_for_transformers(tiny: Tiny, lora: Lora | None, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = stirred(tiny.model(lora=lora))
    trace = trace_of(model, tiny.prompts, ROWS)
    with torch.no_grad():
        before = model.logp(trace, 1.0).logp
    model.save(tmp_path, merged=True)
    plain = tiny.plain(tmp_path)
    assert type(plain) is type(tiny.plain_unchanged())
    # A merged weight is rounded again; both sides are up to 1e-4 from the same pass in float64.
    assert same_as_plain(model, plain, trace) <= 3e-4
    assert plain.generation_config.eos_token_id == [*sorted(model.end)]
    assert "gesso" not in (tmp_path / "config.json").read_text()
    assert names_in(tmp_path) == names_in(tiny.folder)
    with torch.no_grad():
        assert torch.equal(model.logp(trace, 1.0).logp, before)  # as it was
    text = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n"
    again = replace(tiny, folder=tmp_path).model()
    for prompt, before in zip(tiny.prompts, trace.prompts, strict=True):
        ours = again.encode(prompt)
        assert torch.equal(ours.ids, before.ids)
        assert prompt.images == () or torch.equal(ours.pixels, before.pixels)
    with torch.no_grad():
        assert gap(again.logp(trace, 1.0).logp, model.logp(trace, 1.0).logp) <= 1e-4


def test_a_template_in_a_file_of_the_processor(of: Any, tmp_path: Path) -> None:
    """As the makers of Qwen2-VL and Qwen2.5-VL ship it."""
    from transformers import AutoTokenizer

    tiny = of("qwen2.5-vl")
    old = broken(tiny.folder, tmp_path / "old")
    (old / "chat_template.jinja").unlink()
    (old / "chat_template.json").write_text(json.dumps({"chat_template": tokens.TEMPLATE}))
    model = replace(tiny, folder=old).model()
    for prompt in tiny.prompts:
        assert torch.equal(model.encode(prompt).ids, tiny.unchanged().encode(prompt).ids)
    model.save(tmp_path / "new")
    assert AutoTokenizer.from_pretrained(tmp_path / "new").chat_template == tokens.TEMPLATE


def test_a_full_fine_tune_in_half_precision_is_saved_whole(of: Any, tmp_path: Path) -> None:
    """The tower, in half precision, must not set the precision of the rest."""
    tiny = of("qwen2.5-vl")
    model = stirred(tiny.model(dtype="bfloat16"))
    model.save(tmp_path)
    found = dict(tiny.plain(tmp_path).named_parameters())
    assert all(torch.equal(found[name], tensor) for name, tensor in model.policy.tensors().items())
    assert {p.dtype for p in model.module.get_submodule("model.visual").parameters()} == {
        torch.bfloat16
    }


def test_a_model_of_ours_is_not_called_directly(of: Any) -> None:
    """Its attention knows no padding: better no answer than a wrong one."""
    model = of("llama").unchanged()
    with pytest.raises(ValueError, match="load the folder with transformers"):
        model.module(torch.zeros(2, 3, dtype=torch.long))


# Packing


def test_responses_are_packed_with_their_prompts() -> None:
    prompts, row, responses = [6, 2], [0, 1, 0, 1, 0], [3, 1, 3, 1, 3]
    assert pack_responses(prompts, row, responses, 19) == [[0, 1, 2, 3, 4]]  # each prompt once
    assert pack_responses(prompts, row, responses, 15) == [[0, 2, 4], [1, 3]]
    assert pack_responses(prompts, row, responses, 12) == [[0, 2], [1, 3], [4]]
    assert pack_responses(prompts, row, responses, 9) == [[0], [1, 3], [2], [4]]
    assert pack_responses([50], [0, 0], [3, 3], 9) == [[0], [1]]  # too long for any batch: alone
    even = pack_responses([0] * 4, range(4), [6, 3, 3, 4], 13)  # not 13 and 3
    four = pack_responses([0] * 6, range(6), [4, 4, 4, 4, 2, 2], 8)  # 20 tokens need only three
    assert sorted(map(len, four)) == [1, 1, 2, 2], four
    assert even == [[0, 1], [2, 3]] or even == [[0, 2], [1, 3]]


def test_pack() -> None:
    assert pack([], 8) == []
    assert pack([3, 3, 3], 9) == [[0, 1, 2]]
    assert pack([3, 5, 2, 4], 7) == [[0, 3], [1, 2]]
    assert pack([9, 1, 9, 1], 4) == [[0], [1, 3], [2]]  # too long for any batch: alone
    lengths = [int(n) for n in torch.randint(1, 50, (200,), generator=torch.Generator())]
    batches = pack(lengths, 64)
    assert sorted(i for batch in batches for i in batch) == list(range(200))
    assert all(sum(lengths[i] for i in batch) <= 64 for batch in batches)
    assert len(batches) <= 1.1 * sum(lengths) / 64
    assert all(batch == sorted(batch) for batch in batches) and batches == pack(lengths, 64)


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a CUDA device")
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("name", ["qwen2", "qwen2.5-vl"])
def test_four_bits(of: Any, name: str) -> None:
    tiny = of(name)
    model = tiny.model(device="cuda", dtype="bfloat16", quantize="nf4", lora=LORA)
    kinds = {type(part).__name__ for part in model.decoder.layers[0].mlp.modules()}
    assert "Linear4bit" in kinds
    trace = trace_of(model, tiny.prompts, ROWS)
    found = gradient(model.logp(trace, 1.0).logp.cpu(), model.policy.trainable)
    assert found and all(torch.isfinite(g).all() for g in found.values())
    with pytest.raises(UserError, match="into 4-bit weights"):
        model.save(Path("/nowhere"), merged=True)


# Given responses


def test_a_response_is_what_the_template_writes(tiny: Tiny) -> None:
    """After the prompt, up to the token that ends it; images of the prompt change nothing."""
    model = tiny.unchanged()
    for prompt in tiny.prompts:
        ids = model.encode_response(prompt, "four, or 5?").tolist()
        assert model.decode(ids) == "four, or 5?" and ids[-1] == model.tokenizer.eos_token_id
        messages = model._messages(prompt)
        whole = model.tokenizer.apply_chat_template(
            [*messages, {"role": "assistant", "content": "four, or 5?"}],
            chat_template=model.template, tokenize=False,
        )  # fmt: skip
        start = model._chat(messages, "")
        written = model.tokenizer(whole, add_special_tokens=False).input_ids
        before = model.tokenizer(start, add_special_tokens=False).input_ids
        assert written[: len(before)] == before
        assert written[len(before) : len(before) + len(ids)] == ids


def test_responses_that_cannot_be_trained_on(seeing: Tiny, monkeypatch: Any) -> None:
    model, prompt = seeing.unchanged(), Prompt("how many?", where="a.jsonl:3")
    for text, token in (("a<|im_end|>b", "<|im_end|>"), ("<|image_pad|>", "<|image_pad|>")):
        with pytest.raises(UserError) as caught:
            model.encode_response(prompt, text)
        assert f"a.jsonl:3: the response contains {token}, a special" in str(caught.value)
    monkeypatch.setattr(model, "template", "{{ messages | length }}{{ messages[-1].content }}")
    with pytest.raises(UserError, match="a conversation does not begin with its prompt"):
        model.encode_response(prompt, "four")
    monkeypatch.setattr(model, "template", "{{ messages | map(attribute='content') | join }}")
    ends = model.encode_response(prompt, "four")  # without a token that ends it
    assert ends.tolist()[-1] == model.tokenizer.eos_token_id and model.decode(ends) == "four"

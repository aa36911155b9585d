"""The decoding loop against transformers' own `generate`, and the learner's log-probs against those
that came with the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

from gesso.config import Lora
from gesso.samplers.base import Piece, parts
from gesso.samplers.decode import DecodingSampler
from gesso.samplers.next_token import _first_above, inverse_cdf
from gesso.traces.pieces import widened
from gesso.traces.tokens import TokenTrace
from gesso.types import ResponseSpec, SampleSpec
from gesso.weights.publish import Publication
from tests import tokens
from tests.tokens import Tiny, stirred

ROWS = [0, 0, 0, 1, 1, 1, 1, 2, 2, 0, 2]
SEEDS = list(range(100, 100 + len(ROWS)))
LONGEST = 24
SPEC = ResponseSpec(LONGEST, temperature=0.9)
LORA = Lora(rank=4, alpha=12)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokens")
    for name in tokens.BUILDERS:
        tokens.build(name, root / name)
    return root


@pytest.fixture(params=tokens.BUILDERS)
def tiny(request: pytest.FixtureRequest, folders: Path) -> Tiny:
    return Tiny(request.param, folders / request.param)


@pytest.fixture
def of(folders: Path) -> Any:
    return lambda name: Tiny(name, folders / name)


def joined(pieces: Sequence[Piece[TokenTrace]]) -> Piece[TokenTrace]:
    """In the order of the call."""
    index = torch.tensor([i for piece in pieces for i in piece.index])
    order = index.argsort()
    samples = [sample for piece in pieces for sample in piece.samples]
    return Piece(
        index[order].tolist(),
        [samples[i] for i in order.tolist()],
        TokenTrace.concat([piece.trace for piece in pieces]).rows(order),
        widened([piece.logp for piece in pieces])[order],
    )


def draw(sampler: DecodingSampler, tiny: Tiny, spec: ResponseSpec = SPEC) -> Piece[TokenTrace]:
    return joined(list(sampler.sample(tiny.prompts, ROWS, SEEDS, spec)))


@cache
def drawn(tiny: Tiny, temperature: float) -> Piece[TokenTrace]:
    """In batches of 4, by the unchanged model."""
    spec = ResponseSpec(LONGEST, temperature)
    return draw(DecodingSampler(tiny.unchanged(), 4), tiny, spec)


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().abs().max())


@pytest.mark.parametrize("name", ["qwen2", "qwen2.5-vl", "qwen3-vl"])
def test_a_response_does_not_depend_on_the_batch(of: Any, name: str) -> None:
    """With text alone, with positions in images, with features added to several layers."""
    tiny = of(name)
    model = tiny.unchanged()
    first = draw(DecodingSampler(model, 1), tiny)
    assert first.index == list(range(len(ROWS))) and len(set(first.trace.mask.sum(1).tolist())) > 3
    for batch in (3, 64):
        other = draw(DecodingSampler(model, batch), tiny)
        assert torch.equal(first.trace.tokens, other.trace.tokens)
        assert torch.equal(first.trace.mask, other.trace.mask)
        assert gap(first.logp, other.logp) <= 2e-5
    order = [5, 0, 9, 3, 1]
    some = list(
        DecodingSampler(model, 2).sample(
            tiny.prompts, [ROWS[i] for i in order], [SEEDS[i] for i in order], SPEC
        )
    )
    texts = [first.samples[i].text for i in order]
    assert [sample.text for sample in joined(some).samples] == texts


def test_log_probs_are_the_learners(tiny: Tiny) -> None:
    for temperature in (0.9, 0.0):
        piece = drawn(tiny, temperature)
        assert piece.logp.dtype == torch.float32
        found = tiny.unchanged().logp(piece.trace, temperature).logp
        assert gap(found, piece.logp) <= 1e-5
        assert piece.logp[piece.trace.mask].std() > 0.1


# Measured here: .02 to .08 at most and .001 to .006 on average; tiny models' logits are large.
BFLOAT16_GAP, BFLOAT16_MEAN = 0.25, 0.02


IN_BFLOAT16 = [(name, None) for name in tokens.BUILDERS] + [("qwen2", LORA), ("qwen3-vl", LORA)]


@pytest.mark.parametrize("name, lora", IN_BFLOAT16)
def test_log_probs_are_the_learners_in_bfloat16(of: Any, name: str, lora: Lora | None) -> None:
    tiny = of(name)
    model = tiny.model(dtype="bfloat16", lora=lora)
    seen: set[torch.dtype] = set()
    model.decoder.layers[0].mlp.up_proj.register_forward_hook(lambda _, __, o: seen.add(o.dtype))
    piece = draw(DecodingSampler(model, 4), tiny)
    weights = {p.dtype for p in model.policy.trainable.values()}
    assert seen == {torch.bfloat16} and weights == {torch.float32}
    found = model.logp(piece.trace, 0.9).logp
    assert gap(found, piece.logp) <= BFLOAT16_GAP
    assert (
        float((found - piece.logp).detach().abs().sum() / piece.trace.mask.sum()) <= BFLOAT16_MEAN
    )


def test_weights_rounded_once_are_those_of_autocast(of: Any) -> None:
    for name in ("qwen2.5-vl", "qwen2"):  # qwen2's head is its embedding
        tiny = of(name)
        model = tiny.model(dtype="bfloat16")
        rounded = draw(DecodingSampler(model, 4), tiny, ResponseSpec(8, 0.9))
        model._rounded_by_autocast = lambda: []
        plain = draw(DecodingSampler(model, 4), tiny, ResponseSpec(8, 0.9))
        assert torch.equal(rounded.trace.tokens, plain.trace.tokens)
        assert torch.equal(rounded.logp, plain.logp)


@torch.no_grad()
def test_greedy_is_transformers_own(tiny: Tiny) -> None:
    model, plain = tiny.unchanged(), tiny.plain()
    trace = drawn(tiny, 0.0).trace
    for r, prompt in enumerate(trace.prompts):
        inputs = {"input_ids": prompt.ids[None], "attention_mask": torch.ones(1, len(prompt))}
        if prompt.grid is not None:
            inputs |= {"pixel_values": prompt.pixels, "image_grid_thw": prompt.grid}
            inputs["mm_token_type_ids"] = prompt.kinds[None]
        theirs = plain.generate(
            **inputs,
            max_new_tokens=LONGEST,
            do_sample=False,
            suppress_tokens=model.suppressed.tolist(),
            pad_token_id=0,
        )
        for i in (i for i in range(len(ROWS)) if ROWS[i] == r):
            ours = trace.tokens[i][trace.mask[i]]
            assert ours.tolist() == theirs[0, len(prompt) :].tolist()


def test_responses_end_where_they_end(tiny: Tiny) -> None:
    model, piece = tiny.unchanged(), drawn(tiny, 0.9)
    trace = piece.trace
    for i, sample in enumerate(piece.samples):
        response = trace.tokens[i][trace.mask[i]].tolist()
        assert not set(response[:-1]) & model.end
        assert bool(trace.cut[i]) == (response[-1] not in model.end)
        assert len(response) == LONGEST or not trace.cut[i]
        assert sample.text == model.decode(response) and sample.image is None
        assert sample.prompt is not None and sample.seed == SEEDS[i]
        assert sample.prompt.text == tiny.prompts[ROWS[i]].text
    assert 0 < int(trace.cut.sum()) < len(ROWS) and trace.row.tolist() == ROWS
    assert not trace.tokens[~trace.mask].any() and not piece.logp[~trace.mask].any()


def test_a_response_that_ends_at_the_limit_is_not_cut(of: Any) -> None:
    tiny = of("qwen3")
    model, trace = tiny.unchanged(), drawn(tiny, 0.9).trace
    ended = next(i for i in range(len(ROWS)) if not trace.cut[i] and trace.mask[i].sum() > 1)
    length = int(trace.mask[ended].sum())
    for limit, cut in ((length, False), (length - 1, True)):
        other = draw(DecodingSampler(model, 4), tiny, ResponseSpec(limit, 0.9)).trace
        assert bool(other.cut[ended]) == cut and int(other.mask[ended].sum()) == limit


def test_one_token_responses(of: Any) -> None:
    """All finish as they enter: nothing is ever fed."""
    tiny = of("qwen3")
    model = tiny.model()
    model.step = None
    piece = draw(DecodingSampler(model, 2), tiny, ResponseSpec(1))
    assert piece.trace.tokens.shape == (len(ROWS), 1)
    assert gap(model.logp(piece.trace, 1.0).logp, piece.logp) <= 1e-5


def test_every_prompt_and_every_image_is_encoded_once(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over sampling and the passes of old, reference and update."""
    monkeypatch.setattr(DecodingSampler, "continuous", True)
    model = tiny.model(lora=LORA)
    sampler = DecodingSampler(model, 3)
    piece = draw(sampler, tiny, ResponseSpec(6, 0.9))
    assert sampler.prefilled_prompts == 3
    model.logp(piece.trace, 0.9).logp.sum().backward()
    with torch.no_grad():
        model.logp(piece.trace, 0.9, "reference")
    draw(sampler, tiny, ResponseSpec(6, 0.9))
    assert sampler.prefilled_prompts == 6
    assert not tiny.sees or model.encoded_images == 3


def test_a_prompt_is_kept_no_longer_than_needed(of: Any) -> None:
    from gesso.samplers.decode import _Decoding

    tiny = of("qwen2")
    model = tiny.model()
    encoded = [model.encode(p) for p in tiny.prompts]
    decoding = _Decoding(DecodingSampler(model, 2), encoded, [0, 0, 1, 2], [1, 2, 3, 4], SPEC)
    with torch.no_grad():
        decoding._enter()
    assert not decoding.prefilled
    decoding = _Decoding(DecodingSampler(model, 2), encoded, [0, 1, 1, 0], [1, 2, 3, 4], SPEC)
    with torch.no_grad():
        decoding._enter()
    assert set(decoding.prefilled) == {0, 1}


def test_a_slot_holds_the_longest_prompt_with_its_response(of: Any) -> None:
    """On CUDA the last token of a response is fed, too: a place less would be one too few."""
    from gesso.samplers.decode import _Decoding

    model = of("qwen2").model()
    encoded = [model.encode(p) for p in of("qwen2").prompts]
    longest = max(map(len, encoded))
    with torch.no_grad():
        read = model.prefill(encoded[:1])[0]
    for more in range(1, 66):
        decoding = _Decoding(DecodingSampler(model, 1), encoded, [0], [1], ResponseSpec(more))
        columns = len(decoding._new_cache(read).place.columns)
        assert longest + more <= columns < longest + more + 64 and columns % 64 == 0


def test_decoding_compiles_nothing(of: Any, monkeypatch: Any) -> None:
    """Layers that are compiled for updates run as they are: with a cache, each would be compiled
    for itself. The backend stops before code is made."""
    eager = partialmethod(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", eager)
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    tiny = of("qwen3")
    model = tiny.model(lora=LORA, compile=True)
    draw(DecodingSampler(model, 4), tiny, ResponseSpec(3))
    assert model.compiled and graphs["unique_graphs"] == 0


def test_a_step_costs_what_its_sequences_cost(of: Any) -> None:
    """Of every batch, only sequences that still run take part in a step."""
    tiny = of("qwen2.5-vl")
    model = tiny.model()
    steps: list[tuple[int, int]] = []
    plain = model.step

    def counted(tokens: torch.Tensor, positions: Any, mask: torch.Tensor, cache: Any) -> Any:
        steps.append(tuple(mask.shape))
        assert int(mask.sum(1).max()) == mask.shape[1]  # no column that no sequence has
        return plain(tokens, positions, mask, cache)

    model.step = counted
    for batch in (3, 6, 11):
        steps.clear()
        piece = draw(DecodingSampler(model, batch), tiny)
        lengths = piece.trace.mask.sum(1)
        rows = [rows for rows, _ in steps]
        assert sum(rows) == int((lengths - 1).sum())
        assert max(rows) <= batch and min(rows) >= 1 and len(set(rows)) > 1
        assert batch < len(ROWS) or rows == sorted(rows, reverse=True)


def test_a_call_is_cut_at_prompts_if_their_responses_fit() -> None:
    cuts = {batch: [list(part) for part in parts(ROWS, batch, SPEC)] for batch in (2, 4, 7, 11)}
    assert cuts[11] == [list(range(11))]
    assert [len(part) for part in cuts[7]] == [7, 4]
    assert [len(part) for part in cuts[4]] == [3, 4, 4]
    assert [len(part) for part in cuts[2]] == [2, 1, 2, 2, 2, 2]
    image = SampleSpec(steps=1, height=8, width=8)
    assert [len(part) for part in parts(ROWS, 4, image)] == [4, 4, 3]


def test_pieces_come_as_responses_finish(of: Any) -> None:
    tiny = of("qwen2")
    model = tiny.model()
    fed: list[int] = []
    plain = model.step

    def step(*args: Any) -> torch.Tensor:
        fed.append(1)
        return plain(*args)

    model.step = step
    arrived = []
    for piece in DecodingSampler(model, 4).sample(tiny.prompts, ROWS, SEEDS, SPEC):
        arrived.append((len(fed), piece.index))
        assert len(piece.samples) == len(piece.index) == len(piece.logp) == len(piece.trace.row)
        assert piece.trace.tokens.shape[1] == int(piece.trace.mask.sum(1).max())
    assert sorted(i for _, index in arrived for i in index) == list(range(len(ROWS)))
    assert len(arrived) > 3 and arrived[0][0] < arrived[-1][0] / 2
    assert [i for _, index in arrived for i in index] != list(range(len(ROWS)))


def test_the_consumer_of_a_piece_is_not_affected(of: Any) -> None:
    tiny = of("qwen2")
    model = tiny.model(dtype="bfloat16")
    model.policy.snapshot("ema")
    stirred(model)
    before = {name: p.data_ptr() for name, p in model.policy.trainable.items()}
    spec = ResponseSpec(8, 1.0, weights="ema")
    for _ in DecodingSampler(model, 2).sample(tiny.prompts, ROWS, SEEDS, spec):
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        assert {name: p.data_ptr() for name, p in model.policy.trainable.items()} == before
        assert {p.dtype for p in model.policy.trainable.values()} == {torch.float32}


def test_which_weights_write(of: Any) -> None:
    tiny = of("qwen3-vl")
    model = tiny.model(lora=LORA)
    model.policy.snapshot("ema")
    stirred(model)
    plain = drawn(tiny, 0.9)
    for which in ("reference", "ema"):
        found = draw(DecodingSampler(model, 4), tiny, ResponseSpec(LONGEST, 0.9, which))
        assert torch.equal(found.trace.tokens, plain.trace.tokens)
        assert gap(found.logp, plain.logp) <= 1e-5  # with adapters beside the weights
    sampler = DecodingSampler(model, 4)
    current = draw(sampler, tiny)
    assert [s.text for s in current.samples] != [s.text for s in plain.samples]
    assert gap(model.logp(current.trace, 0.9).logp, current.logp) <= 2e-5
    assert sampler.weights.version == 0
    ema = {name: t.clone() for name, t in model.policy.tensors("ema").items()}
    sampler.accept(Publication(7, {"current": ema}))
    assert sampler.weights.version == 7
    assert torch.equal(draw(sampler, tiny).trace.tokens, plain.trace.tokens)


@torch.no_grad()
def test_suppressed_ids_are_never_sampled(tiny: Tiny) -> None:
    """Not even where the model likes them best."""
    model = tiny.unchanged()
    head = model.module.get_output_embeddings()
    pushed = [int(i) for i in model.suppressed]
    bias = torch.zeros(head.weight.shape[0])
    bias[pushed] = 50.0
    hook = head.register_forward_hook(lambda _, __, out: out + bias)
    try:
        for temperature in (1.5, 0.0):
            piece = draw(DecodingSampler(model, 4), tiny, ResponseSpec(8, temperature))
            assert not set(piece.trace.tokens[piece.trace.mask].tolist()) & set(pushed)
            assert torch.isfinite(piece.logp).all()
    finally:
        hook.remove()


def test_inverse_cdf() -> None:
    shares = torch.tensor([0.5, 0.0, 0.25, 0.0, 0.25, 0.0])
    places = torch.tensor([0.0, 0.25, 0.4999, 0.5, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    logits = shares.log().expand(len(places), -1)
    assert inverse_cdf(logits, places).tolist() == [0, 0, 0, 2, 2, 4, 4]
    assert inverse_cdf(logits + 256, places).tolist() == [0, 0, 0, 2, 2, 4, 4]  # e^256: infinite
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 50, generator=generator) * 3
    even = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    drawn = torch.cat([inverse_cdf(logits.expand(len(u), -1), u) for u in even.split(10_000)])
    share = torch.bincount(drawn, minlength=50) / 100_000
    assert gap(share, logits.softmax(-1)[0]) <= 2e-5


def test_inverse_cdf_of_many_ids() -> None:
    """Over many blocks of ids, against the cumulated probabilities of all of them."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(64, 5000, generator=generator) * 2
    logits[:, torch.randperm(5000, generator=generator)[:3000]] = -torch.inf
    uniform = torch.rand(64, generator=generator, dtype=torch.float64)
    cumulated = logits.double().softmax(-1).cumsum(-1)
    expected = torch.searchsorted(cumulated, uniform[:, None], right=True)[:, 0]
    assert torch.equal(inverse_cdf(logits, uniform), expected)
    last = inverse_cdf(logits, torch.full((64,), 1 - 2**-53, dtype=torch.float64))
    assert last.tolist() == [int(row.isfinite().nonzero().max()) for row in logits]


def test_a_number_just_below_and_just_above_a_border() -> None:
    """Of ids, of blocks of 128 and in the last block, which is not full: sums are wide enough to
    tell them apart."""
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(2))
    cumulated = (logits - logits.amax()).exp().double().cumsum(-1)[0]
    ids = torch.tensor([0, 1, 126, 127, 128, 129, 255, 256, 2047, 2048, 3000, 4990, 4991, 4998])
    for past in (False, True):
        uniform = (cumulated[ids] / cumulated[-1]) + (1e-11 if past else -1e-11)
        found = inverse_cdf(logits.expand(len(ids), -1), uniform)
        assert found.tolist() == (ids + past).tolist()


def test_where_rounding_leaves_no_place_it_is_the_last_with_a_share() -> None:
    """Sums of blocks and sums within one may differ in their last bit."""
    shares = torch.tensor([[0.5, 0.0, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    below = torch.tensor([[1.0], [1.0]], dtype=torch.float64)
    assert _first_above(shares.cumsum(-1), below, shares).tolist() == [[2], [1]]
    assert _first_above(shares.cumsum(-1), below / 2, shares).tolist() == [[2], [1]]
    assert _first_above(shares.cumsum(-1), below / 4, shares).tolist() == [[0], [1]]


def test_tokens_follow_their_probabilities(of: Any) -> None:
    """Two tokens of 3,000 samples of one prompt, against the learner's probability of each pair."""
    tiny = of("qwen2.5-vl")
    model = tiny.unchanged()
    n = 3000
    sampler = DecodingSampler(model, 500)
    spec = ResponseSpec(2, 1.0)
    piece = joined(list(sampler.sample(tiny.prompts, [1] * n, [7 * i for i in range(n)], spec)))
    pairs, counts = piece.trace.tokens.unique(dim=0, return_counts=True)
    once = [piece.trace.tokens.tolist().index(pair) for pair in pairs.tolist()]
    probability = piece.logp.sum(1).exp()[once]
    expected = probability * n
    usual = expected > 5
    spread = ((counts - expected)[usual] ** 2 / expected[usual]).sum() / usual.sum()
    assert usual.sum() > 30 and 0.5 < float(spread) < 1.6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", tokens.BUILDERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_recorded_steps_on_cuda(
    of: Any, tmp_path: Path, name: str, dtype: str, lora: Lora | None
) -> None:
    """Slots are used again, some stay empty at the end, and the step is a replayed graph. In half
    precision with heads for which there are kernels."""
    tiny = of(name)
    if dtype == "bfloat16":
        tiny = Tiny(name, tokens.build(name, tmp_path / name, 64))
    model = tiny.model(device="cuda", dtype=dtype, lora=lora)
    piece = draw(DecodingSampler(model, 4), tiny)
    most = {"float32": 1e-3, "bfloat16": BFLOAT16_GAP}[dtype]
    assert gap(model.logp(piece.trace, 0.9).logp.cpu(), piece.logp) <= most
    if dtype == "float32":
        cpu = draw(DecodingSampler(tiny.model(lora=lora), 4), tiny)
        assert gap(model.logp(cpu.trace, 0.9).logp.cpu(), cpu.logp) <= most
        same = [a.text == b.text for a, b in zip(cpu.samples, piece.samples, strict=True)]
        assert sum(same) >= len(same) - 1  # a number that falls between two tokens may part them

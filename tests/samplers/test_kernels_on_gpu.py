"""The Triton kernels of decoding against the same formulas in torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from gesso.config import Lora
from gesso.models.tokens import head, stepping
from gesso.samplers.next_token import add_next_tokens, add_next_tokens_by_torch
from gesso.samplers.slots import SlotCache
from tests import tokens
from tests.samplers.slots import after, assert_equal, end_ids, filled
from tests.tokens import Tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
on_hopper = pytest.mark.usefixtures("hopper")
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture
def hopper() -> None:
    """Not while tests are collected: CUDA must not be in use when processes are forked."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


def random(*size: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*size, device="cuda") * scale).to(dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("n, ids, ends", [(18, 60, 0), (12, 1000, 1), (64, 151_936, 3)])
def test_next_tokens(n: int, ids: int, ends: int, temperature: float) -> None:
    """Sums of probabilities differ in their last bits, so a uniform number close to a boundary may
    give the neighbouring token; none did when this was written."""
    torch.manual_seed(0)
    raw = random(n, ids, dtype=torch.bfloat16, scale=3.0)
    allowed = torch.rand(ids, device="cuda") > 0.3
    allowed[: ids // 3] = False  # whole blocks
    if not temperature:  # of equal logits, torch may take any
        rows = torch.arange(n, device="cuda")
        raw[rows, allowed.nonzero()[-1 - rows % 20, 0]] = 40.0
    buffers, given = filled(n, 6, "cuda"), (raw, temperature, allowed)
    none = torch.empty(0, dtype=torch.long, device="cuda")
    without_end = after(buffers, none, add_next_tokens_by_torch, *given)
    end = end_ids(ends, without_end)
    expected = after(buffers, end, add_next_tokens_by_torch, *given)
    assert (expected.runs != without_end.runs).any() == (ends > 0)
    assert allowed[expected.last[buffers.runs]].all()
    found = after(buffers, end, add_next_tokens, *given)
    assert_equal(found, expected)
    assert_equal(after(buffers, end, add_next_tokens, *given), found, rounding=0.0)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_logits_that_are_not_numbers(temperature: float) -> None:
    """Their tokens are in the vocabulary: others would be read outside of the embedding."""
    torch.manual_seed(0)
    raw = random(18, 200, dtype=torch.float32)
    raw[:, 150] = float("nan")
    raw[::2] = float("nan")
    allowed, end = torch.ones(200, dtype=torch.bool).cuda(), torch.tensor([3]).cuda()
    buffers = filled(18, 6, "cuda")
    tokens = after(buffers, end, add_next_tokens, raw, temperature, allowed).last[buffers.runs]
    assert ((tokens >= 0) & (tokens < 200)).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("n, ids", [(1, 60), (3, 5000), (130, 151_936)])
def test_scores(n: int, ids: int, temperature: float) -> None:
    torch.manual_seed(0)
    raw = random(n, ids, dtype=torch.bfloat16, scale=3.0)
    allowed = torch.rand(ids, device="cuda") > 0.3
    allowed[: ids // 3] = False
    chosen = allowed.nonzero()[:n, 0].contiguous()
    found = head.scored(raw, chosen, temperature, allowed)
    expected = head.scored_by_torch(raw, chosen, temperature, allowed)
    for mine, theirs in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found[2], expected[2], rtol=2**-7, atol=1e-8)
    again = head.scored(raw, chosen, temperature, allowed)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@on_hopper
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "n, outputs, inputs",
    [(5, 40, 48), (1, 130, 72), (64, 2560, 2048), (64, 2048, 11008), (33, 4608, 3584)],
)
def test_projections(n: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    from gesso.models.tokens import step_kernels

    torch.manual_seed(0)
    x, weight = random(n, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, scale=0.1)
    found = step_kernels.projected(x, weight)
    assert error(found.sum(0), x.double() @ weight.double().T) <= 1e-5
    assert torch.equal(found, step_kernels.projected(x, weight))
    assert torch.equal(found[:, :1], step_kernels.projected(x[:1], weight))


@on_hopper
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "n, outputs, inputs", [(5, 24, 48), (64, 11008, 2048), (17, 18944, 3584), (2, 100, 200)]
)
def test_gated_projections(n: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    from gesso.models.tokens import step_kernels

    torch.manual_seed(0)
    x, weight = random(n, inputs, dtype=dtype), random(2 * outputs, inputs, dtype=dtype, scale=0.05)
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    found = step_kernels.gated(x, weight)
    assert error(found, F.silu(gate) * up) <= 2**-8
    assert torch.equal(found, step_kernels.gated(x, weight))
    assert torch.equal(found[:1], step_kernels.gated(x[:1], weight))


@on_hopper
@pytest.mark.parametrize("lora", [None, Lora(rank=4, alpha=8)], ids=["full", "lora"])
@pytest.mark.parametrize("name", tokens.BUILDERS)
def test_a_step(name: str, lora: Lora | None, tmp_path: Path) -> None:
    """Against the operations of torch: biases, norms of queries and keys, positions in images; the
    new keys and values, of the first layer and of all; an idle slot, whose past is empty. Rounding
    to bfloat16 alone changes these states by up to 4e-2."""
    tiny = Tiny(name, tokens.build(name, tmp_path / name, 64))
    model = tiny.model(device="cuda", dtype="bfloat16", lora=lora)
    torch.manual_seed(0)
    for weight in model.policy.trainable.values():
        weight.data += random(*weight.shape, dtype=weight.dtype, scale=0.1)
    prompts = [model.encode(p) for p in tiny.prompts]
    rows = [0, 2, 1, 1]
    capacity = max(map(len, prompts)) + 64
    results = []
    with torch.no_grad(), model.policy.folded(), model.generating("current")():
        stepper = model._stepper
        assert stepper is not None and stepper.kernels is not None
        prefilled = model.prefill(prompts)
        for kernels in (None, stepper.kernels, stepper.kernels):
            stepper.kernels = kernels
            cache = SlotCache(prefilled[0], len(rows) + 1, capacity)
            for slot, row in enumerate(rows):
                cache.fill([slot], prefilled[row])
            at = [*range(len(rows) + 1)], cache.place.lengths.tolist()
            ids = torch.arange(len(rows) + 1, device="cuda") + 3
            positions = torch.tensor([prefilled[r].position for r in rows] + [0], device="cuda")
            states = model.step(ids, positions, cache.place.mask, cache)
            new = [c.transpose(2, 3)[:, at[0], at[1]] for c in (cache.keys, cache.values)]
            results.append((states[: len(rows)], *(c[0] for c in new), *new))
    for found, again, expected, most in zip(
        results[1], results[2], results[0], [4e-2, 1e-2, 1e-2, 4e-2, 4e-2], strict=True
    ):
        assert error(found, expected) <= most
        assert torch.equal(found, again)


@on_hopper
@pytest.mark.parametrize("groups, sharing, width", [(2, 8, 128), (4, 7, 128), (3, 1, 16)])
def test_attention_over_long_pasts(groups: int, sharing: int, width: int) -> None:
    """With one program per processor, and with more."""
    from gesso.models.tokens import step_kernels

    torch.manual_seed(0)
    for n in (4, 64):
        size = (sharing + 2) * groups * width
        heads = torch.randn(3, n, size, device="cuda")
        cos, sin = (random(n, width, dtype=torch.bfloat16) for _ in "cs")
        keys, values = (random(n, groups, 1000, width, dtype=torch.bfloat16) for _ in "kv")
        lengths = torch.linspace(0, 999, n, device="cuda").long()
        lengths[1:4] = torch.tensor([63, 64, 65])
        exact = keys.double(), values.double()
        bias = random(size, dtype=torch.bfloat16)
        given = heads, bias, None, 1e-6, cos, sin, keys, values, lengths, 0.2
        found, again = step_kernels.attend(*given), step_kernels.attend(*given)
        assert torch.equal(found, again)
        new = (heads.sum(0) + bias).bfloat16().double().view(n, -1, width)
        turns = cos[:, None].double(), sin[:, None].double()
        turned = stepping.rotated(new[:, :-groups], *turns, groups, None, 0.0).bfloat16().double()
        query, key, value = turned[:, :-groups], turned[:, -groups:], new[:, -groups:]
        expected = stepping.attend(query, key, value, *exact, lengths, 0.2)
        assert error(found, expected) <= 1e-2
        for written, reference in zip((keys, values), exact, strict=True):
            assert error(written, reference) <= 1e-3

"""The Triton kernels on a CPU, in Triton's interpreter, against the same formulas in torch:
`make test-kernels`. It runs the source of the kernels, not the code that is compiled for a GPU, in
float32 and float16 (its bfloat16 matmuls are wrong)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gesso.config import Lora
from gesso.models.flow.rotation import rotate
from gesso.models.tokens import head, stepping
from gesso.samplers import next_token
from gesso.samplers.slots import SlotCache
from gesso.weights.folded_linear import FoldedLinear, fold_by_torch
from tests import tokens
from tests.samplers.slots import after, assert_equal, end_ids, filled
from tests.tokens import Tiny, stirred
from tests.typed import sure

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton: make test-kernels"
    ),
]
Dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: nullcontext())
    torch.manual_seed(0)
    yield


@pytest.fixture
def step_kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """On 4 processors, without dependent launches."""
    from gesso.models.tokens import step_kernels

    for name in ("gdc_wait", "gdc_launch_dependents"):
        monkeypatch.setattr(step_kernels, name, lambda: None)
    monkeypatch.setattr(step_kernels, "processors", lambda _: 4)
    return step_kernels


def close(found: torch.Tensor, expected: torch.Tensor, precision: torch.dtype) -> None:
    tolerance = 1e-4 if precision == torch.float32 else 4e-3
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=tolerance, atol=tolerance * float(expected.std())
    )


@Dtypes
@pytest.mark.parametrize("n, outputs, inputs", [(5, 40, 48), (1, 130, 300), (64, 128, 256)])
def test_projections(
    step_kernels: Any, n: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(n, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    found = step_kernels.projected(x, weight)
    assert len(found) == step_kernels.plain_tiles(outputs, inputs, 4)[1]
    torch.testing.assert_close(found.sum(0), x.float() @ weight.float().T, rtol=1e-4, atol=1e-3)


@Dtypes
@pytest.mark.parametrize("n, outputs, inputs", [(5, 24, 48), (3, 100, 200), (2, 1100, 64)])
def test_gated_projections(
    step_kernels: Any, n: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    """With programs that have part of a tile, and with large tiles."""
    x = torch.randn(n, inputs).to(dtype)
    weight = (torch.randn(2 * outputs, inputs) * inputs**-0.5).to(dtype)
    gate, up = (x.float() @ weight.float().T).chunk(2, -1)
    close(step_kernels.gated(x, weight), F.silu(gate) * up, dtype)


def test_tiles_keep_processors_busy(step_kernels: Any) -> None:
    """At the sizes of Qwen2.5-VL-3B and 7B on an H200."""

    def programs(outputs: int, inputs: int) -> int:
        tiles, parts = step_kernels.plain_tiles(outputs, inputs, 132)
        return -(-outputs // tiles.own) * parts

    sizes = [(2560, 2048), (2048, 2048), (2048, 11008), (4608, 3584), (3584, 3584), (3584, 18944)]
    assert [programs(*size) for size in sizes] == [120, 128, 128, 108, 112, 112]
    for outputs in (11008, 18944, 24, 200_000):
        tiles = step_kernels.gated_tiles(outputs, 132)
        count = -(-outputs // tiles.own)
        assert 16 <= tiles.own <= tiles.tile and (count <= 264 or tiles.tile == 128)


@pytest.mark.parametrize("lora", [None, Lora(rank=4, alpha=8)], ids=["full", "lora"])
@pytest.mark.parametrize("name", tokens.BUILDERS)
def test_a_step(step_kernels: Any, name: str, lora: Lora | None, tmp_path: Path) -> None:
    """Biases, norms of queries and keys, positions in images; what is written into the cache; an
    idle slot, whose past is empty."""
    tiny = Tiny(name, tokens.build(name, tmp_path / name, 16))
    model = stirred(tiny.model(lora=lora, fold=lora is not None))
    prompts = [model.encode(p) for p in tiny.prompts]
    rows = [0, 2, 1, 1]
    results = []
    with torch.no_grad(), model.policy.folded(), model.generating("current")():
        prefilled = model.prefill(prompts)
        for kernels in (None, step_kernels):
            model._stepper.kernels = kernels
            cache = SlotCache(prefilled[0], len(rows) + 1, max(map(len, prompts)) + 64)
            for slot, row in enumerate(rows):
                cache.fill([slot], prefilled[row])
            positions = torch.tensor([prefilled[r].position for r in rows] + [0])
            ids = torch.arange(len(rows) + 1) + 3
            states = model.step(ids, positions, cache.place.mask, cache)
            results.append((states, cache.keys, cache.values))
    for found, expected in zip(results[1], results[0], strict=True):
        close(found, expected, torch.float32)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_are_added_up(step_kernels: Any, parts: int) -> None:
    """In norms and in attention; the networks above are too small for shared sums."""
    n, groups, sharing, width, capacity = 4, 2, 3, 16, 70
    x, change, gains = torch.randn(n, 40), torch.randn(parts, n, 40), torch.rand(40)
    expected, normed = stepping.add_norm(x, change.sum(0), gains, 1e-6)
    found = step_kernels.add_norm(x, change, gains, 1e-6, torch.float32)
    close(found, normed, torch.float32)
    close(x, expected, torch.float32)
    size = (sharing + 2) * groups * width
    heads, bias = torch.randn(parts, n, size), torch.randn(size)
    cos, sin = torch.randn(n, width), torch.randn(n, width)
    keys, values = torch.randn(2, n, groups, capacity, width)
    lengths, own = torch.tensor([0, 63, 64, 65]), (keys.clone(), values.clone())
    out = step_kernels.attend(heads, bias, None, 1e-6, cos, sin, *own, lengths, 0.2)
    new = (heads.sum(0) + bias).view(n, -1, width)
    turned = stepping.rotated(new[:, :-groups], cos[:, None], sin[:, None], groups, None, 0.0)
    query, key, value = turned[:, :-groups], turned[:, -groups:], new[:, -groups:]
    close(out, stepping.attend(query, key, value, keys, values, lengths, 0.2), torch.float32)
    close(own[0], keys, torch.float32)
    close(own[1], values, torch.float32)


def test_attention_of_one_token() -> None:
    from gesso.models.tokens import kernels

    n, heads, groups, width, capacity = 4, 6, 3, 20, 130
    query, key = torch.randn(n, heads, width), torch.randn(n, groups, width)
    value, keys = torch.randn(n, groups, width), torch.randn(n, groups, capacity, width)
    values, lengths = torch.randn_like(keys), torch.tensor([0, 1, 64, 129])
    own = keys.clone(), values.clone()
    found = kernels.one_token(query, key, value, own[0], own[1], lengths, 0.3)
    close(found, stepping.attend(query, key, value, keys, values, lengths, 0.3), torch.float32)
    assert torch.equal(own[0], keys) and torch.equal(own[1], values)


@Dtypes
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("n, ids, ends", [(18, 60, 0), (12, 1000, 1), (9, 9000, 3)])
def test_next_tokens(n: int, ids: int, ends: int, temperature: float, dtype: torch.dtype) -> None:
    """Some responses end by an id, some at their limit; idle slots stay as they are."""
    from gesso.samplers import next_token_kernels

    raw = (torch.randn(n, ids) * 3).to(dtype)
    allowed = torch.rand(ids) > 0.3
    allowed[: ids // 3] = False  # whole blocks
    buffers, given = filled(n, 6), (raw, temperature, allowed)
    by_torch = next_token.add_next_tokens_by_torch
    without_end = after(buffers, torch.empty(0, dtype=torch.long), by_torch, *given)
    end = end_ids(ends, without_end)
    expected = after(buffers, end, by_torch, *given)
    assert (expected.runs != without_end.runs).any() == (ends > 0)
    assert expected.runs.any() and allowed[expected.last[buffers.runs]].all()
    found = after(buffers, end, next_token_kernels.add_next_tokens, *given, next_token.BLOCK)
    assert_equal(found, expected)


@Dtypes
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("n, ids", [(1, 60), (3, 9000)])
def test_scores(n: int, ids: int, temperature: float, dtype: torch.dtype) -> None:
    from gesso.models.tokens import head_kernels

    raw = (torch.randn(n, ids) * 3).to(dtype)
    allowed = torch.rand(ids) > 0.3
    allowed[: ids // 2] = False  # all that is read at first
    chosen = allowed.nonzero()[:n, 0].contiguous()
    found = head_kernels.scored(raw, chosen, temperature, allowed)
    expected = head.scored(raw, chosen, temperature, allowed)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("out, columns, rank", [(64, 128, 16), (100, 200, 4), (70, 130, 40)])
def test_folding(out: int, columns: int, rank: int) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    from gesso.weights import folding_kernels

    network = nn.Sequential(nn.Linear(columns, out).bfloat16())
    lora = LoraConfig(r=rank, lora_alpha=3 * rank, target_modules=["0"])
    lora._register_custom_module({nn.Linear: FoldedLinear})
    layer = sure(FoldedLinear, inject_adapter_in_model(lora, network)[0])
    for part in (layer.lora_A, layer.lora_B):
        part.float()
    layer.adapter[1].data.normal_(std=1e-2)
    found = folding_kernels.folded(layer.frozen, *layer.adapter, 3.0)
    (expected,) = fold_by_torch([layer])
    assert (found != expected).float().mean() < 1e-3 and not torch.equal(found, layer.frozen)


@pytest.mark.parametrize("per_sample", [False, True])
def test_rotation(per_sample: bool) -> None:
    from gesso.models.flow import rotation_kernels

    n, length, heads, width = 2, 7, 3, 16
    x = torch.randn(n, length, heads, width)
    angles = torch.randn(*(n,) * per_sample, length, width // 2)
    rotation = torch.stack([angles.cos(), angles.sin()], -1)
    turned = rotation_kernels.rotated(x, rotation, False)
    close(turned, rotate(x, rotation), torch.float32)
    close(rotation_kernels.rotated(turned, rotation, True), x, torch.float32)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [7, 77, 256])
def test_attention_of_compiled_networks(length: int, masked: bool) -> None:
    """The mask excludes all keys of the first block."""
    from gesso.models.flow import attention_kernels

    size = (1, 2, length, 64)
    query, key, value, grad = (torch.randn(size, requires_grad=i < 3) for i in range(4))
    mask = torch.ones(1, 1, 1, length, dtype=torch.bool)
    mask[..., : length // 2] = not masked
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    grads = torch.autograd.grad(expected, (query, key, value), grad)
    q, k, v = (x.detach() for x in (query, key, value))
    found, logsumexp = attention_kernels.masked_attention(q, k, v, mask)
    close(found, expected.detach(), torch.float32)
    given = grad, q, k, v, mask if masked else None, found, logsumexp
    for mine, theirs in zip(attention_kernels.attention_grads(*given), grads, strict=True):
        close(mine, theirs, torch.float32)


@Dtypes
@pytest.mark.parametrize("shape", [(2, 16), (9, 128)])
def test_gradients_of_repeated_keys(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Tokens with one copy, with several, with many, whose sum must not be rounded after each, and
    without any."""
    from gesso.models.tokens import repeating_kernels
    from gesso.models.tokens.repeating import Repeats

    tokens = torch.tensor([0, 1, 2, 0, 1, 3, 0, 1, 4, 4, *[6] * 60])
    repeats, grad = Repeats.of(tokens, 8), torch.rand(70, *shape).to(dtype)
    x = torch.randn(8, *shape, requires_grad=True)
    assert torch.equal(repeats(x), x[tokens])
    repeats(x).backward(grad.float())
    found = repeating_kernels.summed(grad, repeats.copies, repeats.starts)
    rounding = 1e-6 if dtype == torch.float32 else 2**-11
    torch.testing.assert_close(found.float(), x.grad, rtol=rounding, atol=0)
    assert not found[[5, 7]].any()

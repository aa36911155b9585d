"""Kernels in Triton against the same formulas in torch."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from gesso.models.flow.rotation import rotate
from gesso.models.tokens.repeating import Repeats
from gesso.weights.folded_linear import FoldedLinear, fold, fold_by_torch
from tests.typed import sure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    "out, columns, rank", [(64, 128, 16), (100, 200, 4), (3072, 1536, 48), (64, 128, 300)]
)
def test_folding(out: int, columns: int, rank: int) -> None:
    """Sums of products differ in their last bits, so a value close to its threshold may be rounded
    to the other neighbour."""
    from gesso.weights import folding_kernels

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(columns, out).bfloat16())
    lora = LoraConfig(r=rank, lora_alpha=3 * rank, target_modules=["0"])
    lora._register_custom_module({nn.Linear: FoldedLinear})
    layer = sure(FoldedLinear, inject_adapter_in_model(lora, network)[0]).cuda()
    for part in (layer.lora_A, layer.lora_B):
        part.float()
    assert torch.equal(fold([layer])[0], layer.frozen), "a new adapter changes nothing"
    layer.adapter[1].data.normal_(std=1e-2)
    (found,), (expected,) = fold([layer]), fold_by_torch([layer])
    assert (found != layer.frozen).float().mean() > 0
    assert (found != expected).float().mean() < 1e-3
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=1e-6)
    a, b = layer.adapter
    assert torch.equal(found, folding_kernels.folded(layer.frozen, a, b, 3.0))


@pytest.mark.parametrize("shape", [(2, 7, 24, 128), (3, 33, 2, 16)])
@pytest.mark.parametrize("per_sample", [False, True])
def test_rotation(shape: tuple[int, ...], per_sample: bool) -> None:
    n, length, _, width = shape
    torch.manual_seed(0)
    x, grad = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in "xg")
    angles = torch.randn(*(n,) * per_sample, length, width // 2, device="cuda")
    rotation = torch.stack([angles.cos(), angles.sin()], -1)
    results = {}
    for device in ("cpu", "cuda"):
        here = x.to(device).requires_grad_()
        out = rotate(here, rotation.to(device))
        results[device] = out, *torch.autograd.grad(out, here, grad.to(device))
    for found, expected in zip(results["cuda"], results["cpu"], strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=2**-7, atol=1e-6)
    strided = x.repeat_interleave(2, 1)[:, ::2]
    assert torch.equal(torch.ops.gesso.rotate(strided, rotation, False), results["cuda"][0])
    torch.library.opcheck(torch.ops.gesso.rotate, (x, rotation, False))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(2, 128), (3, 40), (20, 128)])
def test_gradients_of_repeated_keys(shape: tuple[int, int], compiled: bool) -> None:
    """Tokens with one copy, with several, and without any."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 900, (3000,), device="cuda")
    repeats = Repeats.of(tokens, 1000)
    repeat = torch.compile(repeats, dynamic=True) if compiled else repeats
    x = torch.randn(1000, *shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    grad = torch.randn(3000, *shape, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(repeat(x), x[tokens])
    found, again = (torch.autograd.grad(repeat(x), x, grad)[0] for _ in "ab")
    expected = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    expected.index_put_((tokens,), grad.double(), accumulate=True)
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6)
    assert torch.equal(found, again) and not found[900:].any()

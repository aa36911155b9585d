"""A separate adapter is computed in the precision of its input."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch.utils._python_dispatch import TorchDispatchMode

from gesso.weights.lora_linear import LoraLinear


def adapted(dtype: torch.dtype, ours: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(48, 32)).to(dtype).requires_grad_(False)
    lora = LoraConfig(r=4, lora_alpha=6, target_modules=["0"], init_lora_weights=False)
    if ours:
        lora._register_custom_module({torch.nn.Linear: LoraLinear})
    layer = inject_adapter_in_model(lora, layers)[0]
    assert isinstance(layer, LoraLinear) == ours
    for part in (layer.lora_A, layer.lora_B):
        part.float()
    return layer


def outputs(layer: torch.nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    """The output and the gradients of x, A and B."""
    noise = torch.Generator().manual_seed(1)
    x = torch.randn(5, 48, generator=noise).bfloat16().to(dtype).requires_grad_(True)
    y = layer(x)
    (y * torch.randn(5, 32, generator=noise).bfloat16()).sum().backward()
    adapter = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return [y.detach(), *(t.grad for t in (x, *adapter))]


def test_in_float32_every_bit_is_pefts() -> None:
    ours, pefts = (outputs(adapted(torch.float32, ours), torch.float32) for ours in (True, False))
    assert all(map(torch.equal, ours, pefts))


def test_in_bfloat16_it_is_as_exact_as_bfloat16_is() -> None:
    """Held against PEFT's layer in float64."""
    found = outputs(adapted(torch.bfloat16), torch.bfloat16)
    exact = outputs(adapted(torch.bfloat16, ours=False).double(), torch.float64)
    assert [t.dtype for t in found] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]
    for one, other in zip(found, exact, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-2


class Products(TorchDispatchMode):
    """Precisions of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.dtypes |= {t.dtype for t in args if isinstance(t, torch.Tensor)}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("ours", "dtypes"), [(True, {torch.bfloat16}), (False, {torch.float32})])
def test_no_product_in_float32(ours: bool, dtypes: set[torch.dtype]) -> None:
    layer = adapted(torch.bfloat16, ours)
    with Products() as products:
        outputs(layer, torch.bfloat16)
    assert products.dtypes == {torch.bfloat16} | dtypes


def test_switched_off_it_is_the_frozen_layer() -> None:
    layer = adapted(torch.bfloat16)
    x = torch.randn(3, 48).bfloat16()
    layer.enable_adapters(False)
    assert torch.equal(layer(x), layer.base_layer(x))
    layer.enable_adapters(True)
    assert not torch.equal(layer(x), layer.base_layer(x))

"""A LoRA layer that computes its adapter in the precision of its input."""

from __future__ import annotations

from typing import Any

from peft.tuners import lora
from torch import Tensor
from torch.nn import functional as F


class LoraLinear(lora.Linear):
    """PEFT's linear layer, but float32 adapters are cast to the input's precision. PEFT casts the
    input instead: in a bfloat16 model the adapters' GEMMs then run in float32, without tensor
    cores, and take a sixth of a forward pass of SD3.5-M."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        (name,) = self.active_adapters
        a, b = self.lora_A[name].weight.to(x.dtype), self.lora_B[name].weight.to(x.dtype)
        result = self.base_layer(x, *args, **kwargs)
        return result + F.linear(F.linear(x, a), b) * self.scaling[name]

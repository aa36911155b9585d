"""Two networks of one model, for high and for low noise (Wan 2.2 A14B)."""

from __future__ import annotations

from typing import Any

from diffusers.loaders import PeftAdapterMixin
from torch import Tensor, nn


class Experts(nn.Module, PeftAdapterMixin):
    """Names of tensors begin with those of the pipeline's components."""

    def __init__(self, transformer: nn.Module, transformer_2: nn.Module, boundary: float) -> None:
        """`boundary`: the second network runs at lower timesteps."""
        super().__init__()
        self.transformer = transformer
        self.transformer_2 = transformer_2
        self.boundary = boundary

    @property
    def gradient_checkpointing(self) -> Any:
        return self.transformer.gradient_checkpointing

    def enable_gradient_checkpointing(self) -> None:
        for network in (self.transformer, self.transformer_2):
            network.enable_gradient_checkpointing()

    def rows(self, timestep: Tensor) -> dict[bool, Tensor]:
        """Indices of the rows of each network; True is the second. Networks without rows are left
        out. On the meta device, which has no values, all are of the first."""
        if timestep.is_meta:
            return {False: timestep.new_empty(len(timestep))}
        low = timestep < self.boundary
        split = {second: (low == second).nonzero()[:, 0] for second in (False, True)}
        return {second: index for second, index in split.items() if len(index)}

    def forward(self, second: bool, **inputs: Any) -> Any:
        return (self.transformer_2 if second else self.transformer)(**inputs)

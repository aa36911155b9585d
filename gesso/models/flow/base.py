"""What a flow model is to the rest of Gesso, and the two things all of them share.

A new pipeline of diffusers is one class that answers this protocol; it holds no loop and no
log-prob.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from gesso.models.policy import Policy
from gesso.types import Conditioning, Which

Gradient = Literal["both", "conditional"]


class FlowModel(Protocol):
    policy: Policy
    device: torch.device

    def encode(self, texts: Sequence[str]) -> Conditioning:
        """Prompts → (P, …) conditioning, as the pipeline itself would encode them."""

    def sigmas(self, steps: int) -> Tensor:
        """(steps+1,) float32, from 1 down to 0."""

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """(C, H, W) of a picture of that size, or a UserError saying which sizes fit."""

    def velocity(
        self, x: Tensor, sigma: Tensor, cond: Conditioning, weights: Which = "current"
    ) -> Tensor:
        """x: (N, C, H, W), sigma: (N,), cond: N rows → v: (N, C, H, W) float32."""

    def decode(self, latents: Tensor) -> Tensor:
        """(N, C, H, W) → (N, height, width, 3) uint8 on the CPU."""

    def save(self, folder: Path) -> None:
        """The current weights for plain diffusers: LoRA weights, or the whole pipeline."""


def guided(
    model: FlowModel,
    x: Tensor,
    sigma: Tensor,
    cond: Conditioning,
    negative: Conditioning | None,
    scale: float,
    weights: Which = "current",
    gradient: Gradient = "both",
) -> Tensor:
    """Classifier-free guidance, v = u + scale·(c − u), in sampling and in training alike.

    No `negative`: the conditional branch alone. gradient="both" differentiates both branches (the
    newest reference); "conditional" takes u without gradient (the older one; half the memory).
    """
    if negative is None:
        return model.velocity(x, sigma, cond, weights)
    if gradient == "conditional" and torch.is_grad_enabled():
        c = model.velocity(x, sigma, cond, weights)
        with torch.no_grad():
            u = model.velocity(x, sigma, negative, weights)
    else:
        both = Conditioning.stack([negative, cond])
        u, c = model.velocity(x.repeat(2, 1, 1, 1), sigma.repeat(2), both, weights).chunk(2)
    return u + scale * (c - u)


class PromptCache:
    """Text embeddings, computed once per prompt and kept on the CPU up to `limit` bytes.

    Each prompt is encoded alone: in a batch its last bits would depend on its neighbours, and a
    resumed run, which meets the prompts in another order, would drift from an undisturbed one.
    """

    def __init__(self, model: FlowModel, limit: int = 2**30) -> None:
        self.model = model
        self.limit = limit
        self.encoded = 0  # prompts that went through the text encoders
        self._bytes = 0
        self._rows: OrderedDict[str, Conditioning] = OrderedDict()

    def __call__(self, texts: Sequence[str]) -> Conditioning:
        """(P, …) on the model's device."""
        for text in dict.fromkeys(texts):
            if text not in self._rows:
                row = self.model.encode([text]).to(torch.device("cpu"))
                self.encoded += 1
                self._rows[text] = row
                self._bytes += row.nbytes
        for text in texts:
            self._rows.move_to_end(text)
        result = Conditioning.stack([self._rows[t] for t in texts]).to(self.model.device)
        while self._bytes > self.limit and len(self._rows) > 1:
            self._bytes -= self._rows.popitem(last=False)[1].nbytes
        return result

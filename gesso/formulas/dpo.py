"""Direct preference optimization of responses (arXiv 2305.18290)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus


@dataclass(frozen=True)
class Pairs:
    """One value per response; the two responses of a pair have the same loss and margin."""

    loss: Tensor  # (T,) −log σ(β·margin)
    margin: Tensor  # (T,) gain of the chosen response − gain of the rejected one
    weight: Tensor  # (T,) −∂loss/∂gain


def pairs(gain: Tensor, sign: Tensor, group: Tensor, beta: float) -> Pairs:
    """−log σ(β[Σ(ℓ−ℓ_ref)_w − Σ(ℓ−ℓ_ref)_l]). gain: (T,) Σ(ℓ−ℓ_ref) over a response; sign: 1
    chosen, −1 rejected; group: a number for each pair, whose two responses must both be there.

    −Σ weight·gain, with the weight as a constant, has the gradient of the pairs' summed losses:
    −β·σ(−β·margin)·∇margin. So responses can be processed one by one.
    """
    _, index = group.unique(return_inverse=True)
    signed = sign.double() * gain.double()
    sums = torch.zeros(int(index.max()) + 1 if len(index) else 0, dtype=torch.float64)
    margin = sums.index_add_(0, index, signed)[index]
    weight = beta * torch.sigmoid(-beta * margin) * sign
    return Pairs(softplus(-beta * margin), margin, weight)

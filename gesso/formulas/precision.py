"""How wide numbers are inside a formula."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """float32 at least: half precision is widened, float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

"""Who may do what with weights, by type: samplers and losses run with them, the learner changes
them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from gesso.config import Lora
from gesso.types import Weights, Which


class RunnableWeights(Protocol):
    """What a sampler and a loss may do. `Policy` can also change the weights."""

    @property
    def lora(self) -> Lora | None: ...

    @property
    def trainable(self) -> Mapping[str, nn.Parameter]:
        """To differentiate with respect to them."""

    @property
    def size(self) -> int:
        """Number of trained values."""

    @property
    def is_folded(self) -> bool:
        """Whether this is within `folded`, where no weight may change."""

    def tensors(self, which: Which = "current") -> Weights: ...

    def using(self, which: Which) -> AbstractContextManager[None]:
        """Run the module with those weights. Only "current" may be differentiated."""

    def folded(self, soon: Which | None = None) -> AbstractContextManager[None]:
        """No weight changes within."""

    def per_sample_grads(self, samples: int) -> AbstractContextManager[dict[str, Tensor]]: ...

    def plain(self, which: Which) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the module by its name without PEFT, adapters merged in."""

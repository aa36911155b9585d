"""Access to weights, enforced by types: samplers and losses run with them, the learner changes
them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from gesso.config import Lora
from gesso.types import Weights, Which


class RunnableWeights(Protocol):
    """Interface for samplers and losses. `Policy` can also change the weights."""

    @property
    def lora(self) -> Lora | None: ...

    @property
    def trainable(self) -> Mapping[str, nn.Parameter]:
        """The parameters to differentiate with respect to."""

    @property
    def size(self) -> int:
        """Number of trained values."""

    @property
    def is_folded(self) -> bool:
        """Whether `folded` is active, so that no weight may change."""

    def tensors(self, which: Which = "current") -> Weights: ...

    def using(self, which: Which) -> AbstractContextManager[None]:
        """Runs the module with those weights. Only "current" may be differentiated."""

    def gather(self, which: Which) -> None:
        """The module of this rank has all weights, if they are sharded, until the learner releases
        them. Every rank must call it."""

    def folded(self, soon: Which | None = None) -> AbstractContextManager[None]:
        """All weights stay constant inside this context."""

    def per_sample_grads(self, samples: int) -> AbstractContextManager[dict[str, Tensor]]: ...

    def plain(self, which: Which) -> AbstractContextManager[Iterator[tuple[str, Tensor]]]:
        """Every tensor of the module by its name without PEFT, adapters merged in."""

"""The trained weights of a module, and the other weights that it can run with; combines the modules
of this package. `roles.py` defines the interface for samplers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gesso.config import Lora
from gesso.types import Weights, Which
from gesso.weights import adapters, merge
from gesso.weights.copies import NamedCopies
from gesso.weights.layout import Layout, Sharding
from gesso.weights.lora_folding import LoraFolding
from gesso.weights.per_sample_grads import per_sample_grads
from gesso.weights.trainable import lora_layers, select_trainable

if TYPE_CHECKING:
    from gesso.weights.sharding import Gathering


class Policy:
    def __init__(
        self,
        module: nn.Module,
        lora: Lora | None,
        targets: Sequence[str],
        seed: int,
        frozen: str = "",
        folds: bool = False,
    ) -> None:
        """`frozen` names a submodule that is never trained. `folds`: within `folded` the adapters
        are folded into the weights."""
        self.module = module
        self.lora = lora
        linear_layer = None if lora is None else _linear_layer(folds)
        self.trainable = select_trainable(module, lora, targets, seed, frozen, linear_layer)
        self._copies = NamedCopies(self.trainable)
        self._lora_layers = lora_layers(module) if lora is not None else {}
        self._gathering: Gathering | None = None  # of a sharded module
        self.folding = LoraFolding(self._lora_layers if folds else {}, self._copies)

    # Sharding

    def shard(self, parts: Sharding, device: torch.device, layout: Layout) -> None:
        """Divides the module, or a part of it, over ranks, before there is an optimizer or a copy.
        Adapters stay whole."""
        from gesso.weights import sharding

        assert not self.copies and not self.folds
        sharding.shard(parts, self.whole(parts), device, layout)
        if self.lora is None:
            named = self.module.named_parameters()
            self.trainable = {name: p for name, p in named if p.requires_grad}
            self._copies = sharding.ShardedCopies(self.trainable)
            self.folding = LoraFolding({}, self._copies)  # the other refers to whole weights
        self._gathering = sharding.Gathering(parts.module, self._copies)

    def whole(self, parts: Sharding) -> set[nn.Parameter]:
        """Parameters that every rank has."""
        trained = {p for p in parts.module.parameters() if p.requires_grad}
        return {*parts.whole, *(trained if self.lora is not None else ())}

    def gather(self, which: Which) -> None:
        """Gives this rank's module all weights until `release`. Every rank must call it."""
        if self._gathering is not None:
            self._gathering.gather(which)

    def release(self) -> None:
        if self._gathering is not None:
            self._gathering.release()

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.trainable.values())

    # Named copies

    @property
    def copies(self) -> dict[Which, dict[str, Tensor]]:
        return self._copies.copies

    def tensors(self, which: Which = "current") -> Weights:
        """The live tensors, not a copy of them."""
        return self._copies.tensors(which)

    def load(self, weights: Weights, which: Which = "current") -> None:
        """Copies values in. Strict: a missing or extra name, or another shape, raises."""
        self._copies.load(weights, which)

    def snapshot(self, which: Which) -> None:
        """Creates or overwrites a copy of that name with the current weights. The reference of a
        LoRA policy needs no copy: it is the module with its adapters off."""
        if which != "reference" or self.lora is None:
            self._copies.snapshot(which)

    def using(self, which: Which) -> AbstractContextManager[None]:
        """Runs the module with those weights. Only "current" may be differentiated."""
        if self.is_folded:
            return self.folding.using(which)
        if self.lora is None and self._gathering is not None and self._gathering.which is not None:
            assert which == self._gathering.which, "other weights are gathered"
            return nullcontext()
        if which == "current":
            return nullcontext()
        if which == "reference" and self.lora is not None:
            return adapters.adapters_off(self.module)
        return self._copies.exchanged(which)

    # Folded adapters

    @property
    def folds(self) -> bool:
        """Whether `folded` folds the adapters into the weights."""
        return self.folding.enabled

    @property
    def is_folded(self) -> bool:
        """Whether adapters are folded, so that no weight may change."""
        return self.folding.active

    def folded(self, soon: Which | None = None) -> AbstractContextManager[None]:
        """All weights, including copies, stay constant inside this context. A policy that folds
        runs with its adapters folded into the weights; `soon` names the weights that it folds
        immediately."""
        return self.folding.folded(soon)

    def per_sample_grads(self, samples: int) -> AbstractContextManager[dict[str, Tensor]]:
        """Within `folded`, for passes over `samples` samples, each with one row or several adjacent
        rows. Yields the trained weights by name, (samples, …); backward writes the gradient of each
        sample to their `grad`."""
        assert self.is_folded, "per-sample gradients require folded adapters"
        return per_sample_grads(self.folding.layers, self.trainable, samples)

    # A second adapter

    def add_adapter(self, name: str, seed: int) -> dict[str, nn.Parameter]:
        """Adds a LoRA of the same shape for another trained model, such as a critic. It is inactive
        outside of `using_adapter`."""
        self.folding.enabled = False  # the folded adapter would change within a pass
        return adapters.add_adapter(self.module, name, seed)

    def using_adapter(self, name: str) -> AbstractContextManager[None]:
        """Runs the module with that adapter instead of the policy's. A differentiated pass must not
        be recomputed after this block, so gradient checkpointing must be off."""
        return adapters.using_adapter(self.module, name)

    # Weights without PEFT

    def lora_state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """The adapter in PEFT's format: tensors and LoRA config."""
        return merge.lora_state(self.module)

    def merged(self) -> AbstractContextManager[None]:
        """Inside this context the adapters are merged into plain layers, so that diffusers and
        transformers can save the module. Afterwards the frozen weights are restored bit for bit."""
        return merge.merged(self.module, self._lora_layers)

    @contextmanager
    def plain(self, which: Which) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Every tensor of the module by its name without PEFT, adapters merged in. For engines with
        a separate implementation of the architecture. Their values are valid inside this context.
        If the module is sharded, every rank must read all of them."""
        adapted = which != "reference" or self.lora is None
        with self.using(which):
            yield merge.plain_tensors(self.module, self._lora_layers, adapted)


def _linear_layer(folds: bool) -> type[nn.Module]:
    """Imported on demand: PEFT takes a second, and a full fine-tune does not need it."""
    from gesso.weights.folded_linear import FoldedLinear
    from gesso.weights.lora_linear import LoraLinear

    return FoldedLinear if folds else LoraLinear

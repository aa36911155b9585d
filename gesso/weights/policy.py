"""The trained weights of a module, and the other weights it can run with: the composition of this
package's pieces. `roles.py` says what a sampler sees of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from gesso.config import Lora
from gesso.types import Weights, Which
from gesso.weights import adapters, merge
from gesso.weights.copies import NamedCopies
from gesso.weights.lora_folding import LoraFolding
from gesso.weights.per_sample_grads import per_sample_grads
from gesso.weights.trainable import lora_layers, select_trainable


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
        """`frozen` names a part of the module that is never trained. `folds`: within `folded` the
        adapters are folded into the weights."""
        self.module = module
        self.lora = lora
        linear_layer = _folded_linear() if folds and lora is not None else None
        self.trainable = select_trainable(module, lora, targets, seed, frozen, linear_layer)
        self._copies = NamedCopies(self.trainable)
        self._lora_layers = lora_layers(module) if lora is not None else {}
        self.folding = LoraFolding(self._lora_layers if folds else {}, self._copies)

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
        """Copy values in. Strict: a missing or an extra name, or another shape, raises."""
        self._copies.load(weights, which)

    def snapshot(self, which: Which) -> None:
        """Start a copy of that name from the current weights. The reference of a LoRA policy needs
        none: it is the module with its adapters off."""
        if which != "reference" or self.lora is None:
            self._copies.snapshot(which)

    def using(self, which: Which) -> AbstractContextManager[None]:
        """Run the module with those weights. Only "current" may be differentiated."""
        if self.is_folded:
            return self.folding.using(which)
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
        """Whether adapters are folded somewhere, and no weight may change."""
        return self.folding.active

    def folded(self, soon: Which | None = None) -> AbstractContextManager[None]:
        """All weights, including copies, stay constant inside this context. A policy that folds
        runs with its adapters folded into the weights; `soon` names those it folds at once."""
        return self.folding.folded(soon)

    def per_sample_grads(self, samples: int) -> AbstractContextManager[dict[str, Tensor]]:
        """Within `folded`, for passes of `samples` samples, each of which is one row or several
        adjacent ones. Yields the trained weights by name, (samples, …): a backward pass leaves each
        sample's gradient in their `grad`."""
        assert self.is_folded, "per-sample gradients need folded adapters"
        return per_sample_grads(self.folding.layers, self.trainable, samples)

    # A second adapter

    def add_adapter(self, name: str, seed: int) -> dict[str, nn.Parameter]:
        """LoRA of the same shape for something else to train, such as a critic. It is off, except
        within `using_adapter`."""
        self.folding.enabled = False  # which adapter is folded would change within a pass
        return adapters.add_adapter(self.module, name, seed)

    def using_adapter(self, name: str) -> AbstractContextManager[None]:
        """Run the module with that adapter in place of the policy's. A differentiated pass must not
        be recomputed after this block, as gradient checkpointing does."""
        return adapters.using_adapter(self.module, name)

    # Weights without PEFT

    def lora_state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """The adapter as PEFT writes it: tensors, and the config that gives them meaning."""
        return merge.lora_state(self.module)

    def merged(self) -> AbstractContextManager[None]:
        """The module with its adapters merged into plain layers: what diffusers and transformers
        can save and load. Afterwards the frozen weights are as before, to the bit."""
        return merge.merged(self.module, self._lora_layers)

    def plain(self, which: Which) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the module by the name it has without PEFT, adapters merged in. For an
        engine with its own code of the module's architecture."""
        adapted = which != "reference" or self.lora is None
        with self.using(which):
            yield from merge.plain_tensors(self.module, self._lora_layers, adapted)


def _folded_linear() -> type[nn.Module]:
    """Imported on demand: PEFT takes a second, and a full fine-tune does not need it."""
    from gesso.weights.folded_linear import FoldedLinear

    return FoldedLinear

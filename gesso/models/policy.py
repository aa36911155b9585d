"""The trained weights of a module, and the other weights it can run with.

A policy trains either all of a module's parameters or LoRA adapters in it. Copies of the trained
tensors ("old", "ema", a full fine-tune's "reference") take the place of the current ones for the
length of a `with` block: pointers are exchanged, nothing is copied, and the module, compiled or
not, never knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gesso.config import Lora
from gesso.types import UserError, Weights, Which

SHARD = "5GB"
"""Of a file that is saved, as diffusers and transformers read sizes; larger models take several."""


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
        """`frozen` names a part of the module that is never trained. `folds`: within `standing`
        its adapters are folded into the weights."""
        self.module = module
        self.lora = lora
        module.requires_grad_(False)
        if lora is None:
            module.requires_grad_(True)
            if frozen:
                module.get_submodule(frozen).requires_grad_(False)
        else:
            _add_lora(module, lora, lora.targets or list(targets), seed, frozen, folds)
        self.trained: dict[str, nn.Parameter] = {
            name: p for name, p in module.named_parameters() if p.requires_grad
        }
        for parameter in self.trained.values():
            parameter.data = parameter.data.float()  # master weights stay float32
        self.copies: dict[Which, dict[str, Tensor]] = {}
        self.folds = folds and lora is not None
        self._adapted = _adapters(module) if lora is not None else {}
        self._layers = list(self._adapted.values()) if self.folds else []
        self._folded: dict[Which, list[Tensor]] | None = None  # a matrix a layer; within `standing`
        self._pointed: Which | None = None  # the weights whose matrices the layers have

    def weights(self, which: Which = "current") -> Weights:
        """The live tensors, not a copy of them."""
        if which == "current":
            return {name: p.data for name, p in self.trained.items()}
        return self.copies[which]

    def load(self, weights: Weights, which: Which = "current") -> None:
        """Copy values in. Strict: a missing or an extra name, or another shape, raises."""
        own = self.weights(which)
        shapes = ({n: t.shape for n, t in tensors.items()} for tensors in (own, weights))
        if differ := differences(*shapes):
            raise ValueError(f"weights do not fit: {differ}")
        with torch.no_grad():
            for name, tensor in weights.items():
                if own[name].data_ptr() != tensor.data_ptr():
                    own[name].copy_(tensor)

    def keep(self, which: Which) -> None:
        """Start a copy of that name from the current weights. The reference of a LoRA policy
        needs none: it is the module with its adapters off."""
        if which == "reference" and self.lora is not None:
            return
        self.copies[which] = {name: p.detach().clone() for name, p in self.trained.items()}

    @contextmanager
    def using(self, which: Which) -> Iterator[None]:
        """Run the module with those weights. Only "current" may be differentiated."""
        if self._folded is not None:
            before = self._pointed
            self._point(which)
            try:
                yield
            finally:
                # The current ones stay: checkpointing runs a pass again after this block.
                if before is not None or which != "current":
                    self._point(before)
        elif which == "current":
            yield
        elif which == "reference" and self.lora is not None:
            trained = self._requiring_grad()
            self.module.disable_adapters()
            try:
                yield
            finally:
                self.module.enable_adapters()
                trained()
        else:
            with self._exchanged(which):
                yield

    @contextmanager
    def _exchanged(self, which: Which) -> Iterator[None]:
        """A copy in the place of the current weights."""
        current = {name: p.data for name, p in self.trained.items()}
        try:
            for name, tensor in self.weights(which).items():
                self.trained[name].data = tensor
            yield
        finally:
            for name, tensor in current.items():
                self.trained[name].data = tensor

    @contextmanager
    def standing(self, soon: Which | None = None) -> Iterator[None]:
        """For the length of a `with` block no weight changes, of no copy either. A policy that
        folds then runs with its adapters in the weights, of those copies that are asked for: a
        matrix takes the room of the weight that it stands for. Afterwards the weights are as
        before, to the bit, for they were never touched. `soon` are asked for first: a GPU folds
        them while other things are made ready."""
        if not self.folds or self._folded is not None:
            yield
            return
        self._folded = {}
        try:
            if soon is not None and soon != "reference":
                self._matrices(soon)
            yield
        finally:
            self._point(None)
            self._folded = None

    @property
    def stands(self) -> bool:
        """Whether weights are folded somewhere, and must not change."""
        return self._folded is not None

    def _point(self, which: Which | None) -> None:
        """Every layer to the matrix it has under those weights, made when first asked for; None:
        to its adapter beside the weight."""
        if which == self._pointed:
            return
        matrices: Sequence[Tensor | None] = [None] * len(self._layers)
        if which == "reference":
            matrices = [layer.frozen for layer in self._layers]
        elif which is not None:
            matrices = self._matrices(which)
        for layer, matrix in zip(self._layers, matrices, strict=True):
            layer.folded = matrix
        self._pointed = which

    def _matrices(self, which: Which) -> list[Tensor]:
        from gesso.models.folded import fold

        assert self._folded is not None
        if which not in self._folded:
            with self._exchanged(which):
                self._folded[which] = fold(self._layers)
        return self._folded[which]

    @contextmanager
    def by_sample(self, samples: int) -> Iterator[dict[str, Tensor]]:
        """Within `standing`, for passes of so many samples, in a row each or in several side by
        side: each has trained weights of its own, the same numbers, no copies. Yields them by name,
        (samples, …): in their `grad` a backward pass leaves the gradient of each by itself."""
        assert self._folded is not None, "only folded adapters can be had by sample"
        own = {
            name: p.detach().expand(samples, *p.shape).requires_grad_()
            for name, p in self.trained.items()
        }
        part = "{}.lora_{}.default.weight"
        try:
            for name, layer in self._adapted.items():
                layer.by_sample = own[part.format(name, "A")], own[part.format(name, "B")]
            yield own
        finally:
            for layer in self._layers:
                layer.by_sample = None

    def keep_folded(self, which: Which) -> None:
        """Whoever put the layers' matrices elsewhere, the same numbers, has them kept there."""
        if self._folded is not None and which != "reference":
            self._folded[which] = [layer.folded for layer in self._layers]

    def second_adapter(self, name: str, seed: int) -> dict[str, nn.Parameter]:
        """LoRA of the same shape beside the policy's, for something else to train: off, but within
        `wearing`."""
        import warnings
        from copy import deepcopy

        before = {n for n, _ in self.module.named_parameters()}
        with _drawn_from(seed, self.module), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # that is meant
            self.module.add_adapter(deepcopy(self.module.peft_config["default"]), name)
        self._wear("default")
        self.folds = False  # which of the two is in the weights would change within a pass
        added = {n: p for n, p in self.module.named_parameters() if n not in before}
        for parameter in added.values():
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
        return added

    @contextmanager
    def wearing(self, name: str) -> Iterator[None]:
        """Run the module with that adapter in place of the policy's. What is differentiated must
        not be computed again later, as gradient checkpointing does."""
        try:
            self._wear(name)
            yield
        finally:
            self._wear("default")

    def _wear(self, name: str) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        trained = self._requiring_grad()
        for layer in self.module.modules():
            if isinstance(layer, BaseTunerLayer):
                layer.set_adapter([name])
        trained()

    def _requiring_grad(self) -> Callable[[], None]:
        """Makes what is trained now trained again: PEFT freezes what is switched off."""
        trained = [p for p in self.module.parameters() if p.requires_grad]

        def again() -> None:
            for parameter in trained:
                parameter.requires_grad_(True)

        return again

    def lora_state(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """The adapter as PEFT writes it: tensors, and the config that gives them meaning."""
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(self.module), self.module.peft_config["default"].to_dict()

    @contextmanager
    def merged(self) -> Iterator[None]:
        """The module without PEFT's layers, adapters folded into its weights, for the length of a
        `with` block: what plain diffusers can save and load. The frozen weights come back as they
        were, to the bit."""
        layers = self._adapted
        kept = {name: layer.get_base_layer().weight.data for name, layer in layers.items()}
        try:
            for name, layer in layers.items():
                base = layer.get_base_layer()
                base.weight.data = _merged(layer)
                self.module.set_submodule(name, base)
            yield
        finally:
            for name, layer in layers.items():
                layer.get_base_layer().weight.data = kept[name]
                self.module.set_submodule(name, layer)

    def plain(self, which: Which) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the module by the name it has without PEFT, adapters folded in; one at a
        time, so that folding never takes a second copy of them all. For an engine that has the
        module's architecture in its own code."""
        layers = self._adapted
        off = which == "reference" and self.lora is not None
        with torch.no_grad(), self.using(which):
            for name, tensor in self.module.state_dict().items():
                layer, is_base, own = name.rpartition(".base_layer.")
                if is_base:
                    fold = own == "weight" and not off
                    yield f"{layer}.{own}", _merged(layers[layer]) if fold else tensor
                elif ".lora_" not in name:
                    yield name, tensor

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.trained.values())


def differences(expected: Mapping[str, torch.Size], got: Mapping[str, torch.Size]) -> str:
    """How the shapes of named tensors differ, in words: how many, and the first of each kind. ""
    where they do not."""
    both = expected.keys() & got.keys()
    kinds = {
        "missing": expected.keys() - got.keys(),
        "unexpected": got.keys() - expected.keys(),
        "of another shape": {name for name in both if expected[name] != got[name]},
    }
    words = []
    for kind, names in kinds.items():
        if names:
            first, be = min(names), "tensor is" if len(names) == 1 else "tensors are"
            words.append(f'{len(names)} {be} {kind}, first "{first}"')
            if first in both:
                words[-1] += f": expected {tuple(expected[first])}, got {tuple(got[first])}"
    return "; ".join(words)


def _adapters(module: nn.Module) -> dict[str, Any]:
    """The module's layers that carry adapters, PEFT's own objects, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = module.named_modules()
    return {name: layer for name, layer in layers if isinstance(layer, BaseTunerLayer)}


def _merged(layer: Any) -> Tensor:
    """The weight of a layer with its adapter in it, rounded once."""
    weight = layer.get_base_layer().weight.data
    return (weight.float() + layer.get_delta_weight("default").float()).to(weight.dtype)


@contextmanager
def _drawn_from(seed: int, module: nn.Module) -> Iterator[None]:
    """Numbers of new adapters come from `seed`. A module on the meta device has none, and its
    adapters would take longer to draw than all else about it."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if all(parameter.is_meta for parameter in module.parameters()):
            stack.enter_context(torch.device("meta"))
        torch.manual_seed(seed)
        yield


def _add_lora(
    module: nn.Module, lora: Lora, targets: list[str], seed: int, frozen: str, folds: bool
) -> None:
    """PEFT adapters, gaussian A and zero B, drawn from `seed` and not from global state."""
    from peft import LoraConfig

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        init_lora_weights="gaussian",
        target_modules=targets,
        exclude_modules=rf"{re.escape(frozen)}\..*" if frozen else None,
    )
    if folds:
        from gesso.models.folded import FoldedLinear

        config._register_custom_module({nn.Linear: FoldedLinear})  # PEFT's way to bring a layer
    with _drawn_from(seed, module):
        try:
            module.add_adapter(config)
        except ValueError as error:  # PEFT found no module of these names
            raise UserError(
                f"model.lora.targets = {targets} names no module of {type(module).__name__}; "
                "leave it out for the model's own list"
            ) from error

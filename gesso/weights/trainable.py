"""Selects the trained parameters of a module: all of them, or LoRA adapters inserted by PEFT."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from gesso.config import Lora
from gesso.types import UserError
from gesso.weights.empty import on_meta

ADAPTER = "default"
"""PEFT's name of the adapter that the policy trains."""


def select_trainable(
    module: nn.Module,
    lora: Lora | None,
    targets: Sequence[str],
    seed: int,
    frozen: str,
    linear_layer: type[nn.Module] | None,
) -> dict[str, nn.Parameter]:
    """Freezes all other parameters of the module and returns the trained ones by name, in float32.
    `frozen` names a submodule that is never trained ("": none). `linear_layer` replaces PEFT's
    class for linear layers."""
    module.requires_grad_(False)
    if lora is None:
        module.requires_grad_(True)
        if frozen:
            module.get_submodule(frozen).requires_grad_(False)
    else:
        _insert_lora(module, lora, lora.targets or list(targets), seed, frozen, linear_layer)
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for parameter in trainable.values():
        parameter.data = parameter.data.float()  # master weights stay float32
    return trainable


def lora_layers(module: nn.Module) -> dict[str, Any]:
    """The layers with adapters, which are PEFT objects, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = module.named_modules()
    return {name: layer for name, layer in layers if isinstance(layer, BaseTunerLayer)}


@contextmanager
def initialised_from(seed: int, module: nn.Module) -> Iterator[None]:
    """New adapters are initialised from `seed`, not from global state. Adapters of a module on the
    meta device are created there, without initialisation."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if all(parameter.is_meta for parameter in module.parameters()):
            stack.enter_context(on_meta())
        torch.manual_seed(seed)
        yield


def _insert_lora(
    module: nn.Module,
    lora: Lora,
    targets: list[str],
    seed: int,
    frozen: str,
    linear_layer: type[nn.Module] | None,
) -> None:
    """PEFT adapters, Gaussian A and zero B."""
    from peft import LoraConfig

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        init_lora_weights="gaussian",
        target_modules=targets,
        exclude_modules=rf"{re.escape(frozen)}\..*" if frozen else None,
    )
    if linear_layer is not None:
        config._register_custom_module({nn.Linear: linear_layer})  # PEFT's extension point
    with initialised_from(seed, module):
        try:
            module.add_adapter(config)
        except ValueError as error:  # PEFT matched no module
            raise UserError(
                f"model.lora.targets = {targets} matches no module of {type(module).__name__}; "
                "remove it to use the model's default targets"
            ) from error

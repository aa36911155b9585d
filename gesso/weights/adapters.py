"""Switches PEFT adapters: all of them off, or another one, such as a critic's, on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

from torch import nn

from gesso.weights.trainable import ADAPTER, initialised_from


def add_adapter(module: nn.Module, name: str, seed: int) -> dict[str, nn.Parameter]:
    """Adds a second LoRA of the same shape as the policy's. It is inactive outside of
    `using_adapter`. Returns its parameters, float32 and trainable."""
    before = {n for n, _ in module.named_parameters()}
    with initialised_from(seed, module), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # intended here
        module.add_adapter(deepcopy(module.peft_config[ADAPTER]), name)
    _activate(module, ADAPTER)
    added = {n: p for n, p in module.named_parameters() if n not in before}
    for parameter in added.values():
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
    return added


@contextmanager
def using_adapter(module: nn.Module, name: str) -> Iterator[None]:
    """Runs the module with that adapter instead of the policy's. A differentiated pass must not be
    recomputed after this block, so gradient checkpointing must be off."""
    try:
        _activate(module, name)
        yield
    finally:
        _activate(module, ADAPTER)


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Runs the module with its frozen weights only."""
    with _same_trainable(module):
        try:
            module.disable_adapters()
            yield
        finally:
            module.enable_adapters()


def _activate(module: nn.Module, name: str) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    with _same_trainable(module):
        for layer in module.modules():
            if isinstance(layer, BaseTunerLayer):
                layer.set_adapter([name])


@contextmanager
def _same_trainable(module: nn.Module) -> Iterator[None]:
    """PEFT freezes the adapters that it switches off. This restores `requires_grad` of every
    parameter that was trainable before."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)

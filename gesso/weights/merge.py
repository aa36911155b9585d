"""Weights without PEFT: adapters merged into the tensors of the module, for saving and for other
engines; and the adapter alone, in PEFT's format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gesso.weights.shards import gathered
from gesso.weights.trainable import ADAPTER

SHARD = "5GB"
"""Maximum file size of a saved model, in the notation of diffusers and transformers."""


@contextmanager
def merged(module: nn.Module, layers: Mapping[str, Any]) -> Iterator[None]:
    """Inside this context PEFT's `layers` are plain layers with the adapters merged into their
    weights, so that diffusers or transformers can save the module. Afterwards the frozen weights
    are restored bit for bit."""
    weights = {name: layer.get_base_layer().weight.data for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            base = layer.get_base_layer()
            base.weight.data = _merged_weight(layer)
            module.set_submodule(name, base)
        yield
    finally:
        for name, layer in layers.items():
            layer.get_base_layer().weight.data = weights[name]
            module.set_submodule(name, layer)


def plain_tensors(
    module: nn.Module, layers: Mapping[str, Any], with_adapters: bool
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the module by its name without PEFT, adapters merged in. One at a time, so
    that neither merging nor gathering sharded tensors needs a second copy of all weights."""
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            layer, is_base, suffix = name.rpartition(".base_layer.")
            if is_base:
                merge = suffix == "weight" and with_adapters
                plain = _merged_weight(layers[layer]) if merge else gathered(tensor)
                yield f"{layer}.{suffix}", plain
            elif ".lora_" not in name:
                yield name, gathered(tensor)


def lora_state(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The policy's adapter in PEFT's format: tensors and LoRA config."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(module), module.peft_config[ADAPTER].to_dict()


def _merged_weight(layer: Any) -> Tensor:
    """W + s·BA, rounded once."""
    weight = gathered(layer.get_base_layer().weight.data)
    return (weight.float() + layer.get_delta_weight(ADAPTER).float()).to(weight.dtype)

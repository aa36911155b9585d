"""Gradient checkpointing of transformers' layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


def recomputing(module: Any) -> Callable[[], AbstractContextManager[None]]:
    """Enables gradient checkpointing; it is active within the returned context.

    transformers checkpoints only layers in training mode, and removes their cache. So the layers
    themselves are in training mode during a differentiated pass, but not their submodules: dropout
    stays off."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    module.gradient_checkpointing_enable({"use_reentrant": False})
    layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]

    @contextmanager
    def active() -> Iterator[None]:
        checkpointed = layers if torch.is_grad_enabled() else []
        for layer in checkpointed:
            layer.training = True
        try:
            yield
        finally:
            for layer in checkpointed:
                layer.training = False

    return active

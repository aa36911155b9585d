"""Reads a previously trained LoRA, to start from (`model.lora.path`) or as a teacher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError

from gesso.models.adapter_checks import AdapterFile
from gesso.types import UserError
from gesso.weights.policy import Policy

PREFIX = "transformer."


class AdapterReader(Protocol):
    def read_adapter(self, path: str, key: str) -> AdapterFile: ...


def load_adapter(model: AdapterReader, policy: Policy, path: str) -> None:
    """Loads an adapter in diffusers' format as the current weights of the policy.

    Strict: modules, rank and alpha must match the recipe, otherwise a UserError reports the
    difference. The reference policy is still the base model, with the adapter off.
    """
    assert policy.lora is not None
    adapter = model.read_adapter(path, "model.lora.path")
    policy.load(adapter.fitting(policy.trainable, policy.lora.rank, policy.lora.alpha))


def read_adapter(pipe: Any, path: str, key: str) -> AdapterFile:
    """`key` is the recipe's key with the path, for errors."""
    file = _file(path, key)
    try:
        state, metadata = pipe.lora_state_dict(
            str(file), return_lora_metadata=True, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(
            f'{key} = "{path}": diffusers cannot read it: {str(error).splitlines()[0]}'
        ) from error
    tensors = {name.removeprefix(PREFIX): t for name, t in state.items() if name.startswith(PREFIX)}
    return AdapterFile(file, tensors, _settings(metadata))


def _file(path: str, key: str) -> Path:
    file = Path(os.path.expanduser(path))
    if file.is_dir():
        files = sorted(file.glob("*.safetensors"))
        if len(files) != 1:
            raise UserError(
                f'{key} = "{path}": expected one .safetensors file in that folder, got {len(files)}'
            )
        return files[0]
    if not file.is_file():
        raise UserError(f'{key} = "{path}": no such file or folder')
    return file


def _settings(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """PEFT's settings, which diffusers stores with the weights; adapters saved by other libraries
    have none."""
    return {
        key.removeprefix(PREFIX): value
        for key, value in (metadata or {}).items()
        if key.startswith(PREFIX)
    }

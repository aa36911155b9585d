"""Loads a previously trained LoRA to start from: `model.lora.path`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from gesso.models.adapter_checks import check_alpha, check_modules, check_rank
from gesso.types import UserError
from gesso.weights.policy import Policy

PREFIX = "transformer."


def load_adapter(pipe: Any, policy: Policy, path: str) -> None:
    """Loads an adapter in diffusers' format as the current weights of the policy.

    Strict: modules, rank and alpha must match the recipe, otherwise a UserError reports the
    difference. The reference policy is still the base model, with the adapter off.
    """
    assert policy.lora is not None
    file = _file(path)
    try:
        state, metadata = pipe.lora_state_dict(
            str(file), return_lora_metadata=True, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(
            f'model.lora.path = "{path}": diffusers cannot read it: {str(error).splitlines()[0]}'
        ) from error
    tensors = {key.removeprefix(PREFIX): t for key, t in state.items() if key.startswith(PREFIX)}
    names = {name.replace(".default.", "."): name for name in policy.trainable}
    check_modules(file, names.keys(), tensors.keys())
    check_rank(file, policy.lora.rank, tensors)
    check_alpha(file, policy.lora.alpha, _settings(metadata), policy.lora.rank)
    policy.load({names[key]: tensor for key, tensor in tensors.items()})


def _file(path: str) -> Path:
    file = Path(os.path.expanduser(path))
    if file.is_dir():
        files = sorted(file.glob("*.safetensors"))
        if len(files) != 1:
            raise UserError(
                f'model.lora.path = "{path}": expected one .safetensors file in that folder, '
                f"got {len(files)}"
            )
        return files[0]
    if not file.is_file():
        raise UserError(f'model.lora.path = "{path}": no such file or folder')
    return file


def _settings(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """PEFT's settings, which diffusers stores with the weights; adapters saved by other libraries
    have none."""
    return {
        key.removeprefix(PREFIX): value
        for key, value in (metadata or {}).items()
        if key.startswith(PREFIX)
    }

"""Start from a LoRA that somebody trained before: `model.lora.path`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from gesso.types import UserError
from gesso.weights.policy import Policy

PREFIX = "transformer."


def load_adapter(pipe: Any, policy: Policy, path: str) -> None:
    """The weights of an adapter in diffusers' format become the policy's current ones.

    Strict: modules, rank and alpha must be those of the recipe, or a UserError says what differs.
    The reference policy stays the base model, with the adapter off.
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
    found = {key.removeprefix(PREFIX): t for key, t in state.items() if key.startswith(PREFIX)}
    own = {name.replace(".default.", "."): name for name in policy.trainable}
    check_modules(file, own, found)
    check_rank(file, policy.lora.rank, found)
    check_alpha(file, policy.lora.alpha, _about(metadata), policy.lora.rank)
    policy.load({own[key]: tensor for key, tensor in found.items()})


def _file(path: str) -> Path:
    file = Path(os.path.expanduser(path))
    if file.is_dir():
        files = sorted(file.glob("*.safetensors"))
        if len(files) != 1:
            raise UserError(
                f'model.lora.path = "{path}": expected one .safetensors file in that folder, '
                f"found {len(files)}"
            )
        return files[0]
    if not file.is_file():
        raise UserError(f'model.lora.path = "{path}": no such file or folder')
    return file


def check_modules(file: Path, own: Mapping[str, str], found: Mapping[str, Tensor]) -> None:
    if missing := sorted(own.keys() - found.keys()):
        raise UserError(
            f"adapter {file} has no {missing[0]}, which the recipe trains ({len(missing)} tensors "
            "are missing); set model.lora.targets to the modules of the adapter"
        )
    if extra := sorted(found.keys() - own.keys()):
        raise UserError(
            f"adapter {file} has {extra[0]}, which the recipe does not train ({len(extra)} tensors "
            "too many); set model.lora.targets to the modules of the adapter"
        )


def check_rank(file: Path, rank: int, found: Mapping[str, Tensor]) -> None:
    for key, tensor in found.items():
        module, _, kind = key.removesuffix(".weight").rpartition(".")
        its_rank = tensor.shape[0 if kind == "lora_A" else 1]
        if its_rank != rank:
            raise UserError(
                f"adapter {file} has rank {its_rank} in {module}, the recipe says {rank}; "
                f"set model.lora.rank = {its_rank} if all its modules have it"
            )


def check_alpha(file: Path, alpha: int, about: Mapping[str, Any], rank: int) -> None:
    if about.get("alpha_pattern") or about.get("use_rslora"):
        raise UserError(
            f"adapter {file} scales its modules in different ways (alpha_pattern or rslora), "
            "expected one alpha for all of them"
        )
    its_alpha = about.get("lora_alpha", rank)  # diffusers, too, takes the rank for it
    if its_alpha != alpha:
        told = "has" if "lora_alpha" in about else "does not say its alpha, which then counts as"
        raise UserError(
            f"adapter {file} {told} alpha {its_alpha:g}, the recipe says {alpha}; "
            f"set model.lora.alpha = {its_alpha:g}"
        )


def _about(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """PEFT's settings as diffusers wrote them beside the weights; adapters of others have none."""
    return {
        key.removeprefix(PREFIX): value
        for key, value in (metadata or {}).items()
        if key.startswith(PREFIX)
    }

"""Whether an adapter from a file has the modules, rank and alpha of the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from torch import Tensor

from gesso.types import UserError


def check_modules(file: Path, trained: AbstractSet[str], given: AbstractSet[str]) -> None:
    """`trained`: tensors that the recipe trains; `given`: those of the adapter."""
    if missing := sorted(trained - given):
        raise UserError(
            f"adapter {file} has no {missing[0]}, which the recipe trains ({len(missing)} tensors "
            "are missing); set model.lora.targets to the modules of the adapter"
        )
    if extra := sorted(given - trained):
        raise UserError(
            f"adapter {file} has {extra[0]}, which the recipe does not train ({len(extra)} tensors "
            "too many); set model.lora.targets to the modules of the adapter"
        )


def check_rank(file: Path, rank: int, tensors: Mapping[str, Tensor]) -> None:
    for key, tensor in tensors.items():
        module, _, kind = key.removesuffix(".weight").rpartition(".")
        got = tensor.shape[0 if kind == "lora_A" else 1]
        if got != rank:
            raise UserError(
                f"adapter {file} has rank {got} in {module}, the recipe says {rank}; "
                f"set model.lora.rank = {got} if all its modules have it"
            )


def check_alpha(file: Path, alpha: int, settings: Mapping[str, Any], rank: int) -> None:
    if settings.get("alpha_pattern") or settings.get("use_rslora"):
        raise UserError(
            f"adapter {file} scales its modules in different ways (alpha_pattern or rslora), "
            "expected one alpha for all of them"
        )
    got = settings.get("lora_alpha", rank)  # diffusers, too, takes the rank for it
    if got != alpha:
        says = "has" if "lora_alpha" in settings else "does not say its alpha, which then counts as"
        raise UserError(
            f"adapter {file} {says} alpha {got:g}, the recipe says {alpha}; "
            f"set model.lora.alpha = {got:g}"
        )

"""An adapter read from a file, and checks that it has the modules, rank and alpha of the recipe."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gesso.types import UserError


@dataclass(frozen=True)
class AdapterFile:
    file: Path
    tensors: Mapping[str, Tensor]  # by PEFT's names: "….to_q.lora_A.weight"
    settings: Mapping[str, Any]  # PEFT's; may be empty

    def fitting(self, trained: Collection[str], rank: int, alpha: int) -> dict[str, Tensor]:
        """The tensors by the names of the `trained` parameters. Raises unless modules, rank and
        alpha are those of the recipe."""
        names = adapter_names(trained)
        check_modules(self.file, names.keys(), self.tensors.keys())
        check_rank(self.file, rank, self.tensors)
        check_alpha(self.file, alpha, self.settings, rank)
        return {names[key]: tensor for key, tensor in self.tensors.items()}


def adapter_names(trained: Collection[str]) -> dict[str, str]:
    """Name in an adapter's file → name of the trained parameter."""
    return {name.replace(".default.", "."): name for name in trained}


def check_modules(file: Path, trained: AbstractSet[str], given: AbstractSet[str]) -> None:
    """`trained`: tensors that the recipe trains; `given`: tensors of the adapter."""
    if missing := sorted(trained - given):
        raise UserError(
            f"adapter {file} has no {missing[0]}, which the recipe trains ({len(missing)} tensors "
            "missing); set model.lora.targets to the modules of the adapter"
        )
    if extra := sorted(given - trained):
        raise UserError(
            f"adapter {file} has {extra[0]}, which the recipe does not train ({len(extra)} "
            "unexpected tensors); set model.lora.targets to the modules of the adapter"
        )


def check_rank(file: Path, rank: int, tensors: Mapping[str, Tensor]) -> None:
    for key, tensor in tensors.items():
        module, _, kind = key.removesuffix(".weight").rpartition(".")
        got = tensor.shape[0 if kind == "lora_A" else 1]
        if got != rank:
            raise UserError(
                f"adapter {file} has rank {got} in {module}, but the recipe has rank {rank}; "
                f"set model.lora.rank = {got} if all its modules have this rank"
            )


def check_alpha(file: Path, alpha: int, settings: Mapping[str, Any], rank: int) -> None:
    check_one_alpha(file, settings)
    got = settings.get("lora_alpha", rank)  # as in diffusers, alpha defaults to the rank
    if got != alpha:
        default = "" if "lora_alpha" in settings else " (not stored, so alpha = rank)"
        raise UserError(
            f"adapter {file} has alpha {got:g}{default}, but the recipe has alpha {alpha}; "
            f"set model.lora.alpha = {got:g}"
        )


def check_one_alpha(file: Path, settings: Mapping[str, Any]) -> None:
    if settings.get("alpha_pattern") or settings.get("use_rslora"):
        raise UserError(
            f"adapter {file} scales its modules differently (alpha_pattern or rslora), "
            "expected one alpha for all modules"
        )

"""What all sections of a recipe share: strict parsing, limits, paths and devices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from gesso.types import UserError

if TYPE_CHECKING:
    import torch

PACKAGE = Path(__file__).parent.parent
ZOO = "zoo:"
"""Prefix of paths inside the package: "zoo:signs" is a bundled model."""

MAX_SIDE = 16_384  # pixels
MAX_LAG = 16  # updates: as many batches are in flight, and versions in a checkpoint
MAX_FRAMES = 1_024  # of a video
MAX_STEPS = 1_000  # denoising steps; flow models are trained with as many timesteps
MAX_SAMPLES = 1_000_000  # in memory at once

Dtype = Literal["float32", "bfloat16", "float16"]


class Strict(BaseModel):
    """Frozen, no unknown keys, no silent conversion from text to number."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class Named(BaseModel):
    """A name and the options that belong to it; what the options may be, `build.py` knows."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)
    name: str
    """Name, or "module:Name" for custom code."""

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


def resolve_path(path: str) -> Path:
    """`zoo:…` → inside the package; any other path unchanged, apart from `~`."""
    if path.startswith(ZOO):
        return PACKAGE / "zoo" / path.removeprefix(ZOO)
    return Path(os.path.expanduser(path))


def pick_device(name: str, key: str = "device") -> torch.device:
    """`auto` is CUDA if available. `key` is the recipe's key, for the error about a device that
    cannot be used."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except Exception as error:  # each backend raises its own type
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise UserError(f'{key} = "{name}" is not available: {reason:.160}') from error
    return device

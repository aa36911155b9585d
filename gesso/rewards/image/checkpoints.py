"""Loads published weights of reward models: a file of tensors by name.

Only tensors are unpickled. Loading is strict: a missing or extra name or a different shape raises.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gesso.types import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn


def read(path: str, name: str) -> dict[str, Tensor]:
    """Reads the tensors of a file: `path`, or `name` in the folder or hub repository `path`."""
    file = _file(path, name)
    try:
        tensors = _tensors(file)
    except Exception as error:  # damaged, an HTML page instead of weights, other pickled objects
        reason = first_line(error)
        raise UserError(
            f"{file} cannot be read: {reason} (expected tensors by name: safetensors, or a state "
            "dict saved by torch)"
        ) from error
    return tensors


def fill(network: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    expected = network.state_dict()
    wrong = [
        f"{len(names)} {what}, the first is {min(names)}"
        for what, names in (
            ("missing", expected.keys() - tensors.keys()),
            ("unexpected", tensors.keys() - expected.keys()),
        )
        if names
    ]
    wrong += [
        f"{name} has shape {tuple(tensors[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ][:1]
    if wrong:
        raise UserError(f"the weights of {where} do not match the model: {'; '.join(wrong)}")
    network.load_state_dict(tensors)


def preference_head(width: int) -> nn.Sequential:
    """The head of LAION's aesthetic predictor and of ImageReward: linear layers only. The dropout
    layers have no effect in eval mode and preserve the published numbering."""
    from torch import nn

    return nn.Sequential(
        nn.Linear(width, 1024),
        nn.Dropout(0.2),
        nn.Linear(1024, 128),
        nn.Dropout(0.2),
        nn.Linear(128, 64),
        nn.Dropout(0.1),
        nn.Linear(64, 16),
        nn.Linear(16, 1),
    )


def first_line(error: Exception) -> str:
    """The first line of an error, or its type if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _tensors(file: Path) -> dict[str, Tensor]:
    import torch

    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    state = torch.load(file, map_location="cpu", weights_only=True)
    state = state.get("state_dict", state) if isinstance(state, Mapping) else state
    if not isinstance(state, Mapping) or not all(torch.is_tensor(t) for t in state.values()):
        raise ValueError("it does not contain tensors by name")
    return dict(state)


def _file(path: str, name: str) -> Path:
    location = Path(os.path.expanduser(path))
    if location.is_file():
        return location
    if location.is_dir() or path.startswith((".", "/", "~")):
        if not (location / name).is_file():
            raise UserError(f'no weights: expected a file "{path}", or {name} in that folder')
        return location / name
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(path, name))
    except Exception as error:  # no network, no such repository, no such file
        reason = first_line(error)
        raise UserError(
            f'no weights: {name} cannot be downloaded from "{path}": {reason} (expected a file, a '
            "folder, or a hub repository that is cached or reachable)"
        ) from error

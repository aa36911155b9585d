"""Locates a model's files: a folder, or a name on the hub. Every error is raised as one sentence,
before a library tries to load the model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gesso import config
from gesso.types import UserError


@dataclass(frozen=True)
class ModelFormat:
    """A library's format of model folders."""

    file: str  # describes the folder
    key: str  # in that file: the class or architecture
    folder: str
    family: str


PIPELINE = ModelFormat(
    "model_index.json", "_class_name", "a diffusers pipeline folder", "flow model"
)
TRANSFORMER = ModelFormat(
    "config.json", "model_type", "a transformers model folder", "language model"
)


@dataclass(frozen=True)
class Located:
    source: str  # for the library: a folder, or a name on the hub
    about: dict[str, Any]  # contents of the format's file


def locate(section: config.AnyModel, expected: ModelFormat) -> Located:
    path = section.path
    folder = config.resolve_path(path)
    is_hub_name = path.count("/") == 1 and not folder.parent.is_dir()
    if not path.startswith((config.ZOO, ".", "/", "~")) and is_hub_name:
        return Located(path, _read(_from_hub(path, expected), path))
    file = folder / expected.file
    if file.is_file():
        return Located(str(folder), _read(file, path))
    other = TRANSFORMER if expected == PIPELINE else PIPELINE
    if (folder / other.file).is_file() and other.key in (about := _read(folder / other.file, path)):
        raise UserError(
            f'model.path = "{path}" is {other.folder} ({about[other.key]} in {other.file}), a '
            f'{other.family}, but model.name = "{section.name}" is a {expected.family}: expected '
            f"{expected.folder} with {expected.file}"
        )
    raise UserError(
        f'model.path = "{path}": expected {expected.folder} with {expected.file}, '
        f"but the folder {'does not contain it' if folder.is_dir() else 'does not exist'}"
    )


def _read(file: Path, path: str) -> dict[str, Any]:
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f'model.path = "{path}": {file.name} cannot be read: {error}') from error
    if not isinstance(about, dict):
        raise UserError(
            f'model.path = "{path}": {file.name} contains {about!r:.40}, expected a JSON object'
        )
    return about


def _from_hub(name: str, expected: ModelFormat) -> Path:
    """The file from the hub's cache, or downloaded. A single request is made first: without a
    network, huggingface_hub would retry for half a minute."""
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import (
        GatedRepoError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        cached = try_to_load_from_cache(name, expected.file)
        if isinstance(cached, str):
            return Path(cached)
        get_hf_file_metadata(hf_hub_url(name, expected.file))
        return Path(hf_hub_download(name, expected.file))
    except GatedRepoError as error:
        why = "the model is gated; accept its terms on the hub and set HF_TOKEN to your token"
        raise UserError(f'model.path = "{name}": {why}') from error
    except RepositoryNotFoundError as error:
        why = "no such local folder and no such model on the hub; a private one requires HF_TOKEN"
        raise UserError(f'model.path = "{name}": {why}') from error
    except RemoteEntryNotFoundError as error:
        why = f"the model on the hub has no {expected.file}; expected {expected.folder}"
        raise UserError(f'model.path = "{name}": {why}') from error
    except Exception as error:  # from the HTTP library of huggingface_hub, which changed twice
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f'model.path = "{name}": no such local folder, and the hub cannot be reached '
            f"({reason}); check the network, or set model.path to a downloaded copy of the model"
        ) from error

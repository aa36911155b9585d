"""Where a model's files are: a folder, or a name on the hub. Every mistake raises one sentence
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
    key: str  # in it: the class or architecture
    what: str
    does: str


PIPELINE = ModelFormat("model_index.json", "_class_name", "a diffusers pipeline folder", "flow")
TRANSFORMER = ModelFormat("config.json", "model_type", "a folder of transformers", "language")


@dataclass(frozen=True)
class Located:
    source: str  # for the library: a folder, or a name on the hub
    about: dict[str, Any]  # contents of the kind's file


def locate(section: config.AnyModel, wanted: ModelFormat) -> Located:
    path = section.path
    folder = config.resolve_path(path)
    is_hub_name = path.count("/") == 1 and not folder.parent.is_dir()
    if not path.startswith((config.ZOO, ".", "/", "~")) and is_hub_name:
        return Located(path, _read(_from_hub(path, wanted), path))
    file = folder / wanted.file
    if file.is_file():
        return Located(str(folder), _read(file, path))
    other = TRANSFORMER if wanted == PIPELINE else PIPELINE
    if (folder / other.file).is_file() and other.key in (about := _read(folder / other.file, path)):
        raise UserError(
            f'model.path = "{path}" is {other.what} ({about[other.key]} in {other.file}), which '
            f'{other.does}, but model.name = "{section.name}" {wanted.does}: expected '
            f"{wanted.what} with {wanted.file}"
        )
    raise UserError(
        f'model.path = "{path}": expected {wanted.what} with {wanted.file}, '
        f"found {'a folder without one' if folder.is_dir() else 'no such folder'}"
    )


def _read(file: Path, path: str) -> dict[str, Any]:
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f'model.path = "{path}": {file.name} cannot be read: {error}') from error
    if not isinstance(about, dict):
        raise UserError(f'model.path = "{path}": {file.name} holds {about!r:.40}, expected {{…}}')
    return about


def _from_hub(name: str, wanted: ModelFormat) -> Path:
    """The file from the hub's cache, or downloaded. A single request goes first: without a network
    the hub's libraries would retry for half a minute."""
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
        cached = try_to_load_from_cache(name, wanted.file)
        if isinstance(cached, str):
            return Path(cached)
        get_hf_file_metadata(hf_hub_url(name, wanted.file))
        return Path(hf_hub_download(name, wanted.file))
    except GatedRepoError as error:
        why = "its terms must be accepted on the hub, and a token of that account be in HF_TOKEN"
        raise UserError(f'model.path = "{name}": {why}') from error
    except RepositoryNotFoundError as error:
        why = "no such folder here, and no such model on the hub; a private one needs HF_TOKEN"
        raise UserError(f'model.path = "{name}": {why}') from error
    except RemoteEntryNotFoundError as error:
        why = f"on the hub it has no {wanted.file}; expected {wanted.what}"
        raise UserError(f'model.path = "{name}": {why}') from error
    except Exception as error:  # of the hub's HTTP library, which has changed twice
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f'model.path = "{name}": no such folder here, and the hub cannot be reached '
            f"({reason}); check the network, or download the model elsewhere and give its folder"
        ) from error

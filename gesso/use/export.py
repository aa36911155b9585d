"""Exports the weights of a run for diffusers, transformers and PEFT, with a model card. The export
folder appears only when it is complete."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from gesso.config import resolve_path
from gesso.track.progress import SILENT, Progress
from gesso.track.run_folder import must_be_possible
from gesso.types import UserError
from gesso.use import card, folders
from gesso.use.loaded import LoadedModel
from gesso.use.source import ModelSource

CHUNK = 2**22  # bytes hashed at a time


@dataclass(frozen=True)
class Form:
    merged: bool = False  # merge the LoRA into the base weights
    shard: str | None = None  # maximum file size; None: the model's default, 5GB
    dtype: str | None = None  # of every saved weight; None: no conversion

    def __post_init__(self) -> None:
        if self.shard is not None and not re.fullmatch(r"[1-9]\d*(KB|MB|GB)", self.shard):
            raise UserError(
                f"expected a shard size such as 500MB or 5GB (an integer with KB, MB or GB), got "
                f'"{self.shard}"'
            )
        if self.dtype not in (None, "float32", "bfloat16", "float16"):
            raise UserError(f'expected dtype float32, bfloat16 or float16, got "{self.dtype}"')


def check(source: ModelSource, folder: Path, form: Form) -> None:
    """Raises if the source cannot be exported, before anything is loaded."""
    if source.run is None:
        raise UserError(
            f"{source.name} is not a run; only runs made by `gesso train` can be exported"
        )
    must_be_free(folder, "export folder")
    section = source.recipe.model
    if form.merged and section.quantize is not None:
        raise UserError(
            f'the base model of this run is in 4 bits (model.quantize = "{section.quantize}"), '
            "into which a LoRA cannot be merged without loss: export the LoRA itself, or merge it "
            "into the full weights with --set model.quantize=none"
        )


def must_be_free(folder: Path, what: str) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{what} {folder} already exists; choose a new or empty folder")
    must_be_possible(folder, what)


def export(loaded: LoadedModel, folder: Path, form: Form, progress: Progress = SILENT) -> Path:
    check(loaded.source, folder, form)
    from safetensors import SafetensorError

    aside = folder.parent / f".{folder.name}.writing"
    try:
        shutil.rmtree(aside, ignore_errors=True)  # left by an export that was killed
        aside.mkdir(parents=True)
        _write(loaded, aside, folder, form, progress)
        if folder.exists():
            folder.rmdir()
        os.replace(aside, folder)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"could not export to {folder}: {error}; no files are left there; free disk space or "
            "choose another folder"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _write(loaded: LoadedModel, aside: Path, folder: Path, form: Form, progress: Progress) -> None:
    source = loaded.source
    assert source.run is not None, "`check` guarantees it"
    progress.phase("saving weights")
    shard = {} if form.shard is None else {"shard": form.shard}
    loaded.model.save(aside, form.merged, **shard)
    if form.dtype is not None:
        _cast(aside, form.dtype, progress)
    shutil.copyfile(source.run.path / "config.toml", aside / folders.RECIPE)
    _copy_license(resolve_path(source.recipe.model.path), aside)
    hashes = _hashes(aside, progress)
    progress.phase("writing the model card")
    card.write(loaded, aside, folder, hashes)


def _cast(folder: Path, dtype: str, progress: Progress) -> None:
    """Converts all weights to `dtype`, file by file, and updates the configs."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    files = weight_files(folder)
    progress.phase(f"converting to {dtype}", len(files))
    torch_dtype = getattr(torch, dtype)
    for file in files:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
            names = list(opened.keys())
            tensors = {name: opened.get_tensor(name) for name in names}
        cast = {n: t.to(torch_dtype) if t.is_floating_point() else t for n, t in tensors.items()}
        save_file(cast, file, metadata)
        progress.advance()
    for index in folder.rglob("*.safetensors.index.json"):
        content = json.loads(index.read_text("utf-8"))
        content["metadata"]["total_size"] = sum(
            _bytes_of(f) for f in index.parent.glob("*.safetensors")
        )
        index.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    for file in folder.rglob("config.json"):
        file.write_text(
            re.sub(r'("(?:torch_)?dtype": )"\w+"', rf'\1"{dtype}"', file.read_text("utf-8"))
        )


def _bytes_of(file: Path) -> int:
    """Bytes of the tensors in a file."""
    from safetensors.torch import load_file

    return sum(tensor.nbytes for tensor in load_file(file).values())


def _copy_license(base: Path, folder: Path) -> None:
    """Copies the license files of the base model."""
    for file in sorted(base.glob("LICENSE*")) if base.is_dir() else []:
        if file.is_file() and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def _hashes(folder: Path, progress: Progress) -> dict[str, tuple[int, str]]:
    """Weight file → bytes and sha256."""
    files = weight_files(folder)
    progress.phase("hashing", sum(file.stat().st_size for file in files))
    hashes = {}
    for file in files:
        digest = hashlib.sha256()
        with file.open("rb") as opened:
            while chunk := opened.read(CHUNK):
                digest.update(chunk)
                progress.advance(len(chunk))
        hashes[str(file.relative_to(folder))] = file.stat().st_size, digest.hexdigest()
    return hashes

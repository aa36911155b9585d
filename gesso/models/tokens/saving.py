"""Saves transformers models to folders."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from gesso.weights.roles import RunnableWeights

EXPORTS = ("README.md", "adapter_config.json")
"""Files that describe the weights of the source folder and are not valid for other weights."""


class SavableModel(Protocol):
    module: Any
    tokenizer: Any
    template: str
    source: str
    dtype: torch.dtype

    @property
    def policy(self) -> RunnableWeights: ...


def save_whole(model: SavableModel, folder: Path, shard: str) -> None:
    """Saves the module, its tokenizer and processor, and the other files of the source folder."""
    module = model.module
    with torch.device("meta"):
        plain = type(module)(module.config)  # a PEFT module would save only the adapters
    # A frozen vision tower is in half precision, a fully fine-tuned decoder in float32. A folder
    # has one precision, which transformers takes from the first weight.
    dtype = torch.float32 if model.policy.lora is None else model.dtype
    state = {
        name: t.to(dtype) if t.is_floating_point() else t for name, t in module.state_dict().items()
    }
    plain.load_state_dict(state, assign=True)
    plain.generation_config = module.generation_config
    plain.save_pretrained(folder, max_shard_size=shard)
    save_companions(model, folder)


def save_companions(model: SavableModel, folder: Path, without: Sequence[str] = ()) -> None:
    """Saves tokenizer, processor, license and other files that belong to the model's weights."""
    model.tokenizer.chat_template = model.template
    model.tokenizer.save_pretrained(folder)
    excluded = {*without, *EXPORTS, "chat_template.json"}  # the tokenizer has the template
    for file in sorted(_files_of(model.source)):
        kept = file.suffix in (".json", ".jinja", ".txt", ".model", ".md") or file.stem == "LICENSE"
        skipped = file.name in excluded or file.name.endswith(".index.json")
        if file.is_file() and kept and not skipped and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)


def _files_of(source: str) -> list[Path]:
    """The files of a folder, or those downloaded from the hub."""
    folder = Path(source)
    if not folder.is_dir():
        from transformers.utils import cached_file

        folder = Path(cached_file(source, "config.json", local_files_only=True)).parent
    return list(folder.iterdir())

"""The tensors of a checkpoint, whoever wrote it.

One process writes one file, learner.safetensors. Several ranks write a file each, as
torch.distributed.checkpoint's HuggingFaceStorageWriter does with save_distributed=True: safetensors
again, whose header says where in the whole tensor a shard lies. That format was chosen because it
needs no pickle, no rank waits for another, and torch's own reader puts the parts together for any
number of ranks. Names are those of the one file ("current/…", "ema/…"). state.json says how many
"ranks" there were: a tensor whose last shard is missing looks whole.
"""

from __future__ import annotations

import warnings
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ONE = "learner.safetensors"


def files(folder: Path) -> list[Path]:
    """Those that hold tensors."""
    return sorted(folder.glob("*.safetensors"))


def read(folder: Path, ranks: int, table: str = "") -> dict[str, Tensor]:
    """Tensors whose names begin with `table`, and no others: the moments of the optimizer weigh
    more than what they are for."""
    if ranks == 1:
        return _whole(folder / ONE, table)
    if len(files(folder)) != ranks:
        raise ValueError(f"{ranks} ranks wrote it, and it has {len(files(folder))} of their files")
    return _put_together(folder, table)


def _whole(file: Path, table: str) -> dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        wanted = [name for name in opened.keys() if name.startswith(table)]  # noqa: SIM118
        return {name: opened.get_tensor(name) for name in wanted}


def _put_together(folder: Path, table: str) -> dict[str, Tensor]:
    import torch
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    reader = HuggingFaceStorageReader(str(folder))
    known: dict[str, Any] = reader.read_metadata().state_dict_metadata
    wanted = {name: info for name, info in known.items() if name.startswith(table)}
    state: dict[str, Any] = {}
    for name, info in wanted.items():
        held = sum(prod(chunk.sizes) for chunk in info.chunks)
        if held != prod(info.size):
            raise ValueError(f"{name} is not whole: {held} of {prod(info.size)} values are there")
        state[name] = torch.empty(info.size, dtype=info.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is meant
        load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return state

"""The tensors of a checkpoint, written by one process or by several ranks.

One process writes one file, learner.safetensors. Several ranks write one file each, in the format
of torch.distributed.checkpoint's HuggingFaceStorageWriter with save_distributed=True: safetensors,
with the offset of each shard in the header. That format was chosen because it needs no pickle, no
rank waits for another, and torch's reader combines the shards for any number of ranks. Tensor names
are the same as in the single file ("current/…", "ema/…"). state.json has the number of "ranks",
since a tensor whose last shard is missing looks complete.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ONE = "learner.safetensors"


def files(folder: Path) -> list[Path]:
    """The files with tensors."""
    return sorted(folder.glob("*.safetensors"))


def write(folder: Path, state: Mapping[str, Tensor], group: Any = None) -> None:
    """Every rank must call it, and writes its parts of sharded tensors to a file of its own. A
    tensor that all ranks have is written by one of them. Returns when all files are written.
    `group`: the process group in which ranks agree; None: the default group."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    save(dict(state), storage_writer=writer, process_group=group)


def read(folder: Path, ranks: int | None, table: str = "") -> dict[str, Tensor]:
    """Reads tensors whose names begin with `table`: optimizer states are larger than the weights.
    `ranks` is the number of files; None: one process has written `ONE`."""
    if ranks is None:
        return read_file(folder / ONE, table)
    _expect_files(folder, ranks)
    return _combined(folder, table, _empty)


def read_parts(
    folder: Path, ranks: int, sharded: Callable[[str], Tensor | None], table: str = ""
) -> dict[str, Tensor]:
    """Like `read`, but tensors for which `sharded` returns a sharded tensor are read only in part:
    the result is sharded in the same way."""
    import torch

    def like(name: str, info: Any) -> Tensor:
        pattern = sharded(name)
        if pattern is None or pattern.shape != info.size:
            return _empty(name, info)
        return torch.empty_like(pattern, requires_grad=False)

    _expect_files(folder, ranks)
    return _combined(folder, table, like)


def _expect_files(folder: Path, ranks: int) -> None:
    if len(files(folder)) != ranks:
        raise ValueError(f"expected files of {ranks} ranks, got {len(files(folder))}")


def read_file(file: Path, table: str = "") -> dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        names = [name for name in opened.keys() if name.startswith(table)]  # noqa: SIM118
        return {name: opened.get_tensor(name) for name in names}


def _empty(_: str, info: Any) -> Tensor:
    import torch

    return torch.empty(info.size, dtype=info.properties.dtype)


def _combined(folder: Path, table: str, like: Callable[[str, Any], Tensor]) -> dict[str, Tensor]:
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    reader = HuggingFaceStorageReader(str(folder))
    metadata: dict[str, Any] = reader.read_metadata().state_dict_metadata
    selected = {name: info for name, info in metadata.items() if name.startswith(table)}
    state: dict[str, Any] = {}
    for name, info in selected.items():
        present = sum(prod(chunk.sizes) for chunk in info.chunks)
        if present != prod(info.size):
            raise ValueError(
                f"{name} is incomplete: expected {prod(info.size)} values, got {present}"
            )
        state[name] = like(name, info)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended
        load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return state

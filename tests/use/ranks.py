"""One rank of several: shards the bundled transformer with FSDP2, takes a checkpoint's weights, and
writes them as a checkpoint of several ranks."""

from __future__ import annotations

import json
from pathlib import Path

from gesso.config import PACKAGE

IMPORTED = [
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "diffusers.models.transformers.transformer_sd3",
]


def main(rank: int, ranks: int, source: Path, target: Path) -> None:
    import torch
    import torch.distributed as dist
    from diffusers import SD3Transformer2DModel
    from safetensors.torch import load_file
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    from gesso.track.checkpoints import sealed

    torch.set_num_threads(1)
    store = f"file://{target.parent / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    transformer = SD3Transformer2DModel.from_pretrained(
        PACKAGE / "zoo" / "signs", subfolder="transformer"
    )
    for block in transformer.transformer_blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(transformer, mesh=mesh)
    sharded = dict(transformer.named_parameters())
    state = {}
    for name, tensor in load_file(source / "learner.safetensors").items():
        like = sharded.get(name.partition("/")[2])
        if like is not None and like.shape == tensor.shape:
            tensor = distribute_tensor(tensor, mesh, like.placements)
            assert tensor.to_local().numel() < tensor.numel() or tensor.shape[0] == 1
        state[name] = tensor
    save(state, storage_writer=HuggingFaceStorageWriter(str(target), save_distributed=True))
    if rank == 0:
        meta = json.loads((source / "state.json").read_text())
        (target / "state.json").write_text(json.dumps(sealed(meta | {"ranks": ranks})))
    dist.barrier()
    dist.destroy_process_group()

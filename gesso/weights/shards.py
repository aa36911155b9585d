"""Tensors that may be sharded: divided over ranks, as torch's DTensor. Without its import, which
takes seconds: most runs have no such tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All values of a tensor, gathered if it is sharded: every rank must call it."""
    sharded: Any = tensor
    return sharded.full_tensor() if is_sharded(tensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """`whole`, on the device of the ranks: NCCL does not gather what is kept in host memory."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    return whole(sharded.to(sharded.device_mesh.device_type))


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank; it shares the tensor's memory."""
    sharded: Any = tensor
    return sharded.to_local() if is_sharded(tensor) else tensor


def divided_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has, on the device of `like` and sharded in the same way."""
    if not is_sharded(like) or is_sharded(tensor):
        return tensor.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = like
    mesh = sharded.device_mesh
    moved = tensor.to(mesh.device_type)
    return distribute_tensor(moved, mesh, sharded.placements, src_data_rank=None).to(like.device)

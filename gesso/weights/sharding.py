"""Weights divided over ranks by FSDP2: every rank holds a part of each parameter, and gathers those
of a block while the block runs.

Adapters are never sharded: they are small, and the learner adds up their gradients itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from gesso.types import Weights, Which
from gesso.weights.copies import NamedCopies
from gesso.weights.layout import Layout, Sharding
from gesso.weights.shards import divided_like, local


def _mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    if layout.within == layout.ranks:
        return init_device_mesh(device.type, (layout.ranks,), mesh_dim_names=("shard",))
    sizes = (layout.ranks // layout.within, layout.within)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))


def shard(
    parts: Sharding, whole: Collection[nn.Parameter], device: torch.device, layout: Layout
) -> None:
    """Each block is gathered alone, everything else with the module, except for parameters that
    stay `whole`. Gradients are sums over ranks."""
    # For code that changes the output of a block in place, which these models do not.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    kept = OffloadPolicy()
    if layout.offload:
        kept = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    mesh = _mesh(layout, device)
    for part in (*parts.blocks, parts.module):
        # Without its last argument the module itself would stay gathered after a forward pass, and
        # run the next one with these weights even if another copy was loaded.
        fully_shard(
            part,
            mesh=mesh,
            ignored_params=set(whole),
            offload_policy=kept,
            reshard_after_forward=True,
        )
    for parameter in whole:
        parameter.data = parameter.data.to(device)
    for sharded in sharded_parts(parts.module):
        # By default gradients are averages over ranks; gloo has no product with a factor.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def sharded_parts(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


class ShardedCopies(NamedCopies):
    """Copies of sharded weights. FSDP keeps its own references to the local tensors, and ignores
    `parameter.data = …`; so values are exchanged instead of pointers."""

    def load(self, weights: Weights, which: Which = "current") -> None:
        like = self.tensors(which)
        known = weights.keys() & like.keys()
        divided = {name: divided_like(weights[name], like[name]) for name in known}
        super().load({**weights, **divided}, which)

    @contextmanager
    def exchanged(self, which: Which) -> Iterator[None]:
        self.exchange(which)
        try:
            yield
        finally:
            self.exchange(which)

    @torch.no_grad()
    def exchange(self, which: Which) -> None:
        """Twice restores the weights."""
        if which == "current":
            return
        for name, copy in self.copies[which].items():
            current, other = local(self.trainable[name].data), local(copy)
            kept = current.clone()
            current.copy_(other)
            other.copy_(kept)


class Gathering:
    """All weights of a sharded module on every rank, for code that reads them outside of a forward
    pass. Every rank must gather at the same time."""

    def __init__(self, module: nn.Module, copies: NamedCopies) -> None:
        self.parts = sharded_parts(module)
        self.copies = copies
        self.which: Which | None = None  # the gathered weights

    def gather(self, which: Which) -> None:
        if self.which == which:
            return
        self.release()
        self.which = which
        if isinstance(self.copies, ShardedCopies):
            self.copies.exchange(which)
        for part in self.parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()

    def release(self) -> None:
        if self.which is None:
            return
        for part in self.parts:
            part.reshard()
            part.set_reshard_after_forward(True, recurse=False)
        if isinstance(self.copies, ShardedCopies):
            self.copies.exchange(self.which)
        self.which = None

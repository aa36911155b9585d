"""What ranks divide, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from gesso import config
from gesso.types import UserError


@dataclass(frozen=True)
class Sharding:
    """What ranks divide: a module, whose blocks are gathered one at a time. Parameters that are
    used outside of its forward pass stay `whole`."""

    module: nn.Module
    blocks: Sequence[nn.Module]
    whole: Sequence[nn.Parameter] = ()


@dataclass(frozen=True)
class Layout:
    """`within` consecutive ranks divide the weights; every such group has all of them. `offload`:
    in host memory, except for the block that runs."""

    ranks: int
    within: int
    offload: bool

    @classmethod
    def of(cls, cluster: config.Cluster, ranks: int) -> Layout:
        within = cluster.shard_within or ranks
        if ranks % within:
            raise UserError(f"cluster.shard_within = {within} must divide the {ranks} workers")
        return cls(ranks, within, cluster.offload)

"""How ranks divide the weights."""

from __future__ import annotations

from dataclasses import dataclass

from gesso import config


@dataclass(frozen=True)
class Layout:
    """`within` consecutive ranks divide the weights; every such group has all of them. `offload`:
    in host memory, except for the block that runs."""

    ranks: int
    within: int
    offload: bool

    @classmethod
    def of(cls, cluster: config.Cluster, ranks: int) -> Layout:
        return cls(ranks, cluster.shard_within or ranks, cluster.offload)

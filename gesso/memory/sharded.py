"""Memory of sharded weights: what each rank holds of them, and what it gathers while they run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from gesso.memory.meta import MASTER
from gesso.weights.layout import Layout, Sharding

ARRIVING = 2
"""Blocks in memory while one arrives: it is received as one tensor, which is copied to the
parameters. On a GPU the previous block runs meanwhile."""
GRADIENTS = 2
"""Blocks of gradients at once: those of the block that runs, and the tensor that ranks add up."""


@dataclass(frozen=True)
class Shards:
    """Bytes of the parameters that ranks divide."""

    parameters: frozenset[nn.Parameter]
    weights: int
    trained: int  # of these, the trained weights; also the size of gradients and copies
    block: int  # the largest block
    rest: int  # outside of the blocks; gathered in every pass
    ranks: int
    offload: bool
    overlaps: bool  # a block arrives while another one runs

    @classmethod
    def of(
        cls, parts: Sharding, whole: Collection[nn.Parameter], layout: Layout, on_gpu: bool
    ) -> Shards:
        """`whole` are the parameters that every rank has."""
        divided = frozenset(parts.module.parameters()) - frozenset(whole)
        blocks = [_bytes([p for p in block.parameters() if p in divided]) for block in parts.blocks]
        total = _bytes(list(divided))
        return cls(
            divided,
            total,
            _bytes([p for p in divided if p.requires_grad]),
            max(blocks, default=0),
            total - sum(blocks),
            layout.within,
            layout.offload,
            on_gpu,
        )

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self.parameters

    def elsewhere(self, size: int) -> int:
        """How many of `size` sharded bytes are on other ranks or in host memory."""
        return size if self.offload else size - size // self.ranks

    @property
    def gathered(self) -> int:
        """Most bytes gathered at once in a pass without gradients."""
        return self.rest + (ARRIVING + self.overlaps) * self.block

    @property
    def gathered_with_gradients(self) -> int:
        """Most bytes of gathered weights and gradients in a pass with gradients."""
        return self.gathered + (self.rest + GRADIENTS * self.block if self.trained else 0)


NOT_SHARDED = Shards(frozenset(), 0, 0, 0, 0, ranks=1, offload=False, overlaps=False)


def _bytes(parameters: Sequence[nn.Parameter]) -> int:
    return sum(p.numel() * (MASTER if p.requires_grad else p.itemsize) for p in parameters)

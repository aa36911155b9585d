"""Traces that stay with the workers that sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RemoteTrace:
    """References to N samples in workers."""

    pieces: Sequence[str]  # all pieces of the calls that these samples come from
    at: Sequence[tuple[str, int]]  # N: a piece, and a position in it

    def rows(self, index: Tensor) -> RemoteTrace:
        return RemoteTrace(self.pieces, [self.at[i] for i in index.tolist()])

    @staticmethod
    def concat(traces: Sequence[RemoteTrace]) -> RemoteTrace:
        pieces = list(dict.fromkeys(name for trace in traces for name in trace.pieces))
        return RemoteTrace(pieces, [place for trace in traces for place in trace.at])

"""Base class of scorers that wrap another scorer."""

from __future__ import annotations

from gesso.rewards.base import Scorer


class ScorerWrapper:
    """Forwards everything but `score` to the inner scorer."""

    def __init__(self, inner: Scorer) -> None:
        self.inner = inner

    @property
    def groupwise(self) -> bool:
        return self.inner.groupwise

    @property
    def processes(self) -> int:
        return self.inner.processes

    @property
    def hits(self) -> int:
        return self.inner.hits

    @property
    def random(self) -> bool:
        return self.inner.random

    async def close(self) -> None:
        await self.inner.close()

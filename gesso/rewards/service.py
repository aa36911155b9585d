"""Rewards on an event loop of their own, so that scoring goes on while sampling does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from gesso.rewards import compose
from gesso.types import Sample, Score


@dataclass(frozen=True)
class Scored:
    scores: list[Score]
    started: float  # time.perf_counter
    ended: float


class RewardService:
    def __init__(self, rewards: Sequence[compose.Weighted]) -> None:
        self.rewards = list(rewards)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def submit(self, samples: Sequence[Sample]) -> Future[Scored]:
        """Start scoring; the answer comes as a future."""
        return asyncio.run_coroutine_threadsafe(self._score(samples), self._loop)

    async def _score(self, samples: Sequence[Sample]) -> Scored:
        started = time.perf_counter()
        scores = await compose.score(self.rewards, samples)
        return Scored(scores, started, time.perf_counter())

    def close(self) -> None:
        """End every worker process and connection; safe to call twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        for reward in self.rewards:
            await reward.scorer.close()

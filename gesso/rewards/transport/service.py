"""Runs the rewards on a separate event loop, so that scoring overlaps with sampling."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from gesso.rewards import compose
from gesso.rewards.base import Scorer
from gesso.types import Sample, Score


@dataclass(frozen=True)
class Scored:
    scores: list[Score]
    started: float  # time.perf_counter
    ended: float


class RewardService:
    """`rewards` score training batches, `held_out` evaluations (default: the same rewards). The two
    may share a scorer."""

    def __init__(
        self,
        rewards: Sequence[compose.WeightedReward],
        held_out: Sequence[compose.WeightedReward] = (),
    ) -> None:
        self.rewards = list(rewards)
        self.held_out = list(held_out) or self.rewards
        self._reported_hits = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def processes(self) -> int:
        """Processes on this machine that score a training batch."""
        return sum(reward.scorer.processes for reward in self.rewards)

    def new_hits(self) -> int:
        """Scores from a cache since the last call."""
        previous = self._reported_hits
        self._reported_hits = sum(scorer.hits for scorer in self._scorers)
        return self._reported_hits - previous

    @property
    def _scorers(self) -> list[Scorer]:
        return list({id(r.scorer): r.scorer for r in [*self.rewards, *self.held_out]}.values())

    def submit(self, samples: Sequence[Sample], held_out: bool = False) -> Future[Scored]:
        """Starts scoring and returns a future."""
        rewards = self.held_out if held_out else self.rewards
        return asyncio.run_coroutine_threadsafe(_score(rewards, samples), self._loop)

    def close(self) -> None:
        """Stops every worker process and connection; safe to call twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        for scorer in self._scorers:
            await scorer.close()


async def _score(rewards: Sequence[compose.WeightedReward], samples: Sequence[Sample]) -> Scored:
    started = time.perf_counter()
    scores = await compose.score(rewards, samples)
    return Scored(scores, started, time.perf_counter())

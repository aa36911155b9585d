"""Runs the rewards on a separate event loop, so that scoring overlaps with sampling.

Rewards of single samples score every piece as soon as it is finished, groupwise rewards every group
as soon as its last sample is. Neither depends on how the samples were cut into pieces, nor on the
order in which these arrive.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait
from dataclasses import dataclass, replace

from gesso.rewards import compose
from gesso.rewards.base import Scorer
from gesso.rewards.transport.pool import ServerPool
from gesso.rewards.wrapper import ScorerWrapper
from gesso.timeline import recorder
from gesso.types import Sample, Score


@dataclass(frozen=True)
class _Columns:
    scores: Sequence[Sequence[Score]]  # of each reward, of each sample
    started: float
    ended: float


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

    def fail_early(self) -> None:
        """Requests to servers are repeated once, and not as often as in a run."""
        for scorer in self._scorers:
            while isinstance(scorer, ScorerWrapper):
                scorer = scorer.inner
            pool = getattr(scorer, "pool", None)
            if isinstance(pool, ServerPool):
                pool.retries = min(pool.retries, 1)

    @property
    def _scorers(self) -> list[Scorer]:
        return list({id(r.scorer): r.scorer for r in [*self.rewards, *self.held_out]}.values())

    def begin(
        self,
        groups: Sequence[int],
        held_out: bool = False,
        weights: Mapping[str, float] | None = None,
    ) -> Scoring:
        """Scoring of a call whose sample i belongs to group `groups[i]`. `weights`, by name: those
        of the rewards of training in this call."""
        if held_out:
            return Scoring(self, self.held_out, groups)
        rewards = self.rewards
        if weights is not None:
            rewards = [replace(reward, weight=weights[reward.name]) for reward in rewards]
        return Scoring(self, rewards, groups)

    def groupwise(self, held_out: bool = False) -> list[str]:
        """Names of the rewards that compare the samples of a group."""
        rewards = self.held_out if held_out else self.rewards
        return [reward.name for reward in rewards if reward.scorer.groupwise]

    def score(self, samples: Sequence[Sample], held_out: bool = False) -> list[Score]:
        """Scores samples of one group and waits for the scores."""
        scoring = self.begin([0] * len(samples), held_out)
        scoring.add(range(len(samples)), samples)
        return scoring.result().scores

    def start(
        self, rewards: Sequence[compose.WeightedReward], samples: Sequence[Sample]
    ) -> Future[_Columns]:
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


MAX_WAITING = 2**30
"""Bytes of images that wait for their scores; sampling waits while there are more."""


class Scoring:
    """The scores of one sampling call, whose samples are added as they finish."""

    def __init__(
        self,
        service: RewardService,
        rewards: Sequence[compose.WeightedReward],
        groups: Sequence[int],
    ) -> None:
        self.service = service
        self.rewards = rewards
        self.groups = groups
        self._sizes = Counter(groups)
        self._arrived: dict[int, dict[int, Sample]] = {}  # of incomplete groups, by position
        self._given: dict[int, Score] = {}  # without rewards: the scores given with the samples
        self._calls: list[_Call] = []

    def add(self, index: Sequence[int], samples: Sequence[Sample]) -> None:
        """Finished samples and their positions in the call. Waits while too many are not scored."""
        if not self.rewards:
            self._given |= {i: Score(s.given) for i, s in zip(index, samples, strict=True)}
            return
        self._start(False, index, samples)
        for i, sample in zip(index, samples, strict=True):
            group = self.groups[i]
            members = self._arrived.setdefault(group, {})
            members[i] = sample
            if len(members) == self._sizes[group]:
                order = sorted(members)
                self._start(True, order, [members[j] for j in order])
                del self._arrived[group]

    def _start(self, groupwise: bool, index: Sequence[int], samples: Sequence[Sample]) -> None:
        which = [i for i, r in enumerate(self.rewards) if r.scorer.groupwise is groupwise]
        if which:
            future = self.service.start([self.rewards[i] for i in which], samples)
            size = sum(0 if s.image is None else s.image.nbytes for s in samples)
            self._calls.append(_Call(which, index, future, size))
            while sum(call.size for call in self._unscored) > MAX_WAITING:
                wait([call.columns for call in self._unscored], return_when=FIRST_COMPLETED)

    @property
    def _unscored(self) -> list[_Call]:
        return [call for call in self._calls if not call.columns.done()]

    @property
    def pending(self) -> int:
        """The number that `result` will report through `advance`: samples, counted once for
        rewards of single samples and once for groupwise ones."""
        return sum(len(call.index) for call in self._calls)

    def result(self, advance: Callable[[int], object] = lambda count: None) -> Scored:
        """Waits for the last score. The scores are in the order of the call."""
        if not self.rewards:
            now = time.perf_counter()
            return Scored([self._given[i] for i in range(len(self.groups))], now, now)
        assert not self._arrived, "a group is incomplete"
        size = {call.columns: len(call.index) for call in self._calls}
        for future in as_completed(size):
            advance(size[future])
        rows: list[dict[int, Score]] = [{} for _ in self.groups]
        for call in self._calls:
            for reward, scores in zip(call.rewards, call.columns.result().scores, strict=True):
                for i, score in zip(call.index, scores, strict=True):
                    rows[i][reward] = score
        order = range(len(self.rewards))
        totals = [compose.total(self.rewards, [row[r] for r in order]) for row in rows]
        found = [call.columns.result() for call in self._calls]
        return Scored(totals, min(c.started for c in found), max(c.ended for c in found))


@dataclass(frozen=True)
class _Call:
    """Some rewards of some samples."""

    rewards: Sequence[int]  # positions in the list of rewards
    index: Sequence[int]  # positions of the samples in the sampling call
    columns: Future[_Columns]
    size: int  # bytes of images


async def _score(rewards: Sequence[compose.WeightedReward], samples: Sequence[Sample]) -> _Columns:
    started = time.perf_counter()
    scores = await compose.score_columns(rewards, samples)
    ended = time.perf_counter()
    recorder.add(recorder.REWARDS, "score", started, ended)
    return _Columns(scores, started, ended)

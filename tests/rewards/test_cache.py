"""Identical samples are scored once; any difference gives another key."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gesso import build, run
from gesso.config import RewardEntry
from gesso.config.parsing import parse
from gesso.rewards import assembly, base
from gesso.rewards.transport.cache import CachedScorer
from gesso.rewards.transport.workers import WorkerScorer
from gesso.types import Prompt, Sample, Score
from tests.rewards.servers import grey

HERE = "tests.rewards.served_rewards"


class Counting:
    """Brightness, with a record of the requested samples; dark ones fail."""

    groupwise = False
    processes = hits = 0
    random = False

    def __init__(self) -> None:
        self.requested: list[int] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.broken = False

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        self.requested += [int(s.pixels[0, 0, 0]) for s in samples]
        await self.may_answer.wait()
        if self.broken:
            raise RuntimeError("no")
        return [
            Score(float(s.pixels.mean())) if s.pixels.mean() > 9 else Score.failed("dark")
            for s in samples
        ]

    async def close(self) -> None:
        self.requested = []


def values(scores: Sequence[Score]) -> list[float | None]:
    return [score.value for score in scores]


def test_each_sample_is_scored_once_and_scores_keep_their_order() -> None:
    async def go() -> None:
        inner = Counting()
        cached = CachedScorer(inner, "x")
        assert values(await cached.score([grey(v) for v in (20, 10, 20, 30, 10)])) == [
            20, 10, 20, 30, 10,
        ]  # fmt: skip
        assert inner.requested == [20, 10, 30] and cached.hits == 2
        assert values(await cached.score([grey(v) for v in (30, 40, 10)])) == [30, 40, 10]
        assert inner.requested == [20, 10, 30, 40] and cached.hits == 4
        await cached.close()
        assert inner.requested == []

    asyncio.run(go())


def test_pending_scores_are_awaited() -> None:
    async def go() -> None:
        inner = Counting()
        inner.may_answer.clear()
        cached = CachedScorer(inner, "x")
        waiting = [
            asyncio.ensure_future(cached.score([grey(50), grey(60 + i % 2)])) for i in range(6)
        ]
        while sorted(inner.requested) != [50, 60, 61]:
            await asyncio.sleep(0)
        inner.may_answer.set()
        got = await asyncio.gather(*waiting)
        assert [values(scores) for scores in got] == [[50, 60 + i % 2] for i in range(6)]
        assert sorted(inner.requested) == [50, 60, 61]

    asyncio.run(go())


def test_a_cancelled_waiter_does_not_cancel_the_others() -> None:
    async def go() -> None:
        inner = Counting()
        inner.may_answer.clear()
        cached = CachedScorer(inner, "x")
        first = asyncio.ensure_future(cached.score([grey(50)]))
        while not inner.requested:
            await asyncio.sleep(0)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(cached.score([grey(50)]), 0.05)
        inner.may_answer.set()
        assert values(await first) == [50] and inner.requested == [50]

    asyncio.run(go())


def test_failures_are_not_cached() -> None:
    async def go() -> None:
        inner = Counting()
        cached = CachedScorer(inner, "x")
        for _ in range(2):
            assert (await cached.score([grey(1)]))[0].error == "dark"
        assert inner.requested == [1, 1]
        inner.broken = True
        results = await asyncio.gather(
            cached.score([grey(70)]), cached.score([grey(70)]), return_exceptions=True
        )
        assert all(isinstance(r, RuntimeError) for r in results)
        inner.broken = False
        assert values(await cached.score([grey(70)])) == [70]

    asyncio.run(go())


def test_the_least_recently_used_are_evicted() -> None:
    async def go() -> None:
        inner = Counting()
        cached = CachedScorer(inner, "x", entries=3)
        for v in (10, 20, 30, 10, 40):  # 20 is the least recently used
            await cached.score([grey(v)])
        inner.requested = []
        for v in (10, 30, 40, 20):
            await cached.score([grey(v)])
        assert inner.requested == [20] and len(cached._scores) == 3

    asyncio.run(go())


def black(height: int, width: int) -> np.ndarray:
    return np.zeros((height, width, 3), dtype=np.uint8)


DIFFERENT: list[Sample] = [
    Sample(Prompt("a", "n", {"c": 1}), black(4, 6), 0),
    Sample(Prompt("b", "n", {"c": 1}), black(4, 6), 0),
    Sample(Prompt("a", "m", {"c": 1}), black(4, 6), 0),
    Sample(Prompt("an", "", {"c": 1}), black(4, 6), 0),
    Sample(Prompt("a", "n", {"c": 2}), black(4, 6), 0),
    Sample(Prompt("a", "n", {"d": 1}), black(4, 6), 0),
    Sample(Prompt("a", "n", {"c": "1"}), black(4, 6), 0),
    Sample(Prompt("a", "n", {"c": 1}), black(6, 4), 0),  # the same bytes
    Sample(Prompt("a", "n", {"c": 1}), black(4, 6) + np.uint8(1), 0),
    Sample(Prompt("a", "n", {"c": 1}), black(4, 6), 0, text=""),
    Sample(Prompt("a", "n", {"c": 1}), None, 0, text=""),
    Sample(Prompt("a", "n", {"c": 1}), None, 0, text="yes"),
    Sample(Prompt("a", "n", {"c": 1}), black(4, 6)[None], 0, fps=8.0),
    Sample(Prompt("a", "n", {"c": 1}), black(4, 6)[None], 0, fps=16.0),
]


def test_the_key_includes_everything_a_score_may_depend_on() -> None:
    cached = CachedScorer(Counting(), "x")
    assert len({cached.key(s) for s in DIFFERENT}) == len(DIFFERENT)
    first = DIFFERENT[0]
    elsewhere = replace(first, seed=5, prompt=replace(first.prompt, where="other.txt:3"))
    assert cached.key(elsewhere) == cached.key(first)
    assert CachedScorer(Counting(), "y").key(first) != cached.key(first)
    flipped = replace(first, image=np.arange(72, dtype=np.uint8).reshape(4, 6, 3)[:, ::-1])
    whole = replace(first, image=np.ascontiguousarray(flipped.pixels))
    assert cached.key(flipped) == cached.key(whole)  # a view equals its copy


@pytest.mark.parametrize(
    "entry, kept",
    [
        ({"name": f"{HERE}:echo"}, True),
        ({"name": f"{HERE}:echo", "cache": False}, False),
        ({"name": f"{HERE}:noisy"}, False),
        ({"name": f"{HERE}:Noisy"}, False),
        ({"name": "jpeg-compressibility"}, True),
    ],
)
def test_random_rewards_are_not_cached(entry: dict[str, Any], kept: bool) -> None:
    scorer = assembly.scorer(parse(RewardEntry, entry, "reward"))
    assert isinstance(scorer, CachedScorer) == kept
    inner = scorer.inner if isinstance(scorer, CachedScorer) else scorer
    assert isinstance(inner, WorkerScorer)


def test_options_are_part_of_the_key() -> None:
    entries = [{"name": f"{HERE}:counted", "log": "x", "seconds": s} for s in (0.0, 1.0)]
    one, two = (assembly.scorer(parse(RewardEntry, e, "reward")) for e in entries)
    assert isinstance(one, CachedScorer) and isinstance(two, CachedScorer)
    assert one.key(grey(1)) != two.key(grey(1))


def test_a_reward_is_not_random_by_default() -> None:
    assert not base.is_random(base.load(f"{HERE}:echo", {}))
    assert base.is_random(base.load(f"{HERE}:noisy", {}))


def test_a_run_scores_no_image_twice(recipe_data: dict, tmp_path: Path) -> None:
    """With constant weights every evaluation samples the same held-out images."""
    requested = {}
    for cache in (True, False):
        log = tmp_path / f"log-{cache}"
        entry = {"name": f"{HERE}:counted", "log": str(log), "cache": cache}
        data = recipe_data | {"reward": [entry], "optimizer": {"lr": 0.0, "weight_decay": 0.0}}
        finished = run.train(build.recipe_from(data), folder=tmp_path / str(cache), quiet=True)
        evaluations = [row for row in finished.rows() if "eval/reward" in row]
        assert len(evaluations) == 2
        assert len({row["eval/reward"] for row in evaluations}) == 1
        requested[cache] = len(log.read_text().split())
    assert requested == {True: 2 * 6 + 3, False: 2 * 6 + 2 * 3}

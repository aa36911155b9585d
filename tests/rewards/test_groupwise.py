"""Rewards that compare the samples of a prompt: whole groups, however the samples arrive."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gesso import build, run
from gesso.config import RemoteEntry, RewardEntry
from gesso.config.parsing import parse
from gesso.rewards import assembly, base
from gesso.rewards.compose import WeightedReward
from gesso.rewards.transport.cache import CachedScorer
from gesso.rewards.transport.remote import RemoteScorer
from gesso.rewards.transport.serve import BatchingScorer
from gesso.rewards.transport.service import RewardService
from gesso.rewards.transport.workers import WorkerScorer
from gesso.types import Prompt, Sample, Score, UserError, eval_seed, seed_of
from gesso.use.evaluate import EvaluationRequest, evaluate_all
from gesso.use.source import find
from tests.rewards.servers import grey, served

HERE = "tests.rewards.served_rewards"


class Recorded:
    """Brightness minus that of the group's first member; `calls` are the seeds of each call."""

    processes = hits = 0
    random = False

    def __init__(self, groupwise: bool) -> None:
        self.groupwise = groupwise
        self.calls: list[list[int]] = []
        self.fails: set[int] = set()  # seeds

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        self.calls.append([s.seed for s in samples])
        origin = float(samples[0].pixels.mean()) if self.groupwise else 0.0
        return [
            Score.failed("no") if s.seed in self.fails else Score(float(s.pixels.mean()) - origin)
            for s in samples
        ]

    async def close(self) -> None: ...


def text(reply: str, prompt: str = "?") -> Sample:
    return Sample(Prompt(prompt), None, 0, text=reply)


def test_groups_are_whole_and_in_order_however_samples_arrive() -> None:
    """Single samples are scored as they arrive, a group with its last sample."""
    groups = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    samples = [grey(v) for v in (90, 20, 50, 30, 31, 33, 70, 60, 80)]
    whole = [[90, 20, 50], [30, 31, 33], [70, 60, 80]]
    expected = None
    rng = random.Random(0)
    for _ in range(5):
        alone, together = Recorded(False), Recorded(True)
        rewards = [WeightedReward("one", 1.0, alone), WeightedReward("all", 10.0, together)]
        service = RewardService(rewards)
        order = rng.sample(range(9), 9)
        scoring = service.begin(groups)
        cuts = sorted(rng.sample(range(1, 9), 3))
        for start, stop in zip([0, *cuts], [*cuts, 9], strict=True):
            scoring.add(order[start:stop], [samples[i] for i in order[start:stop]])
        assert scoring.pending == 18
        counted: list[int] = []
        scored = scoring.result(counted.append)
        service.close()
        assert sum(counted) == 18 and scored.started <= scored.ended
        assert sorted(together.calls) == sorted(whole)
        assert len(alone.calls) == 4
        expected = expected or scored.scores
        assert scored.scores == expected
    assert expected is not None
    assert [s.parts["all"] for s in expected] == [0, -70, -40, 0, 1, 3, 0, -10, 10]
    assert [s.value for s in expected][:2] == [90, 20 - 700]


def test_a_group_keeps_samples_that_another_reward_cannot_score() -> None:
    alone, together = Recorded(False), Recorded(True)
    alone.fails = {20}
    service = RewardService([WeightedReward("a", 1.0, alone), WeightedReward("b", 1.0, together)])
    scores = service.score([grey(v) for v in (10, 20, 30)])
    service.close()
    assert together.calls == [[10, 20, 30]]
    assert [s.value for s in scores] == [10, None, 50] and scores[1].error == "a: no"


def worker(name: str, **options: Any) -> WorkerScorer:
    return WorkerScorer(f"{HERE}:{name}", options, 1, batch=2, timeout=60.0, groupwise=True)


def test_a_failed_group_fails_alone() -> None:
    """An exception, a dead process and a failed sample; a group larger than `batch` is whole."""
    scorer = worker("Longest")

    async def go() -> list[list[Score]]:
        groups = [["a", "ccc", "bb"], ["raise", "x"], ["die", "x"], ["", "dd", "d"]]
        scored = [await scorer.score([text(t) for t in group]) for group in groups]
        await scorer.close()
        return scored

    good, raised, died, partly = asyncio.run(go())
    assert [s.value for s in good] == [0, 1, 0]
    assert [s.error for s in raised] == ["raised RuntimeError: no such group"] * 2
    assert [s.error for s in died] == ["the worker died (exit status 3), 3 times"] * 2
    assert [(s.value, s.error) for s in partly] == [(None, "empty"), (1, None), (0, None)]


def test_a_group_is_cached_as_a_whole() -> None:
    async def go() -> None:
        inner = Recorded(True)
        cached = CachedScorer(inner, "x")
        first = [grey(v) for v in (10, 20, 30)]
        waiting = [cached.score(first) for _ in range(2)]
        assert (await asyncio.gather(*waiting)) == [[Score(0), Score(10), Score(20)]] * 2
        assert len(inner.calls) == 1 and cached.hits == 3
        assert (await cached.score(first[::-1]))[2] == Score(-20)  # another order: another group
        assert (await cached.score(first[:2])) == [Score(0), Score(10)]
        assert (await cached.score([*first[:2], first[1]])) == [Score(0), Score(10), Score(10)]
        assert len(inner.calls) == 4 and cached.hits == 3
        inner.fails = {41}
        for _ in range(2):
            assert (await cached.score([grey(40), grey(41)]))[1].error == "no"
        assert len(inner.calls) == 6

    asyncio.run(go())


def test_groups_of_several_clients_are_not_mixed() -> None:
    async def go() -> None:
        inner = Recorded(True)
        shared = BatchingScorer(inner, size=8, lanes=2)
        groups = [[grey(v), grey(v + 1), grey(v + 2)] for v in (10, 20, 30)]
        scores = await asyncio.gather(*(shared.score(group) for group in groups))
        assert [[s.value for s in group] for group in scores] == [[0, 1, 2]] * 3
        assert sorted(inner.calls) == [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
        await shared.close()

    asyncio.run(go())


def ask(url: str, samples: list[Sample], groupwise: bool) -> list[Score]:
    async def go() -> list[Score]:
        remote = RemoteScorer(RemoteEntry(urls=[url], batch=2), groupwise)
        try:
            return await remote.score(samples)
        finally:
            await remote.close()

    return asyncio.run(go())


def test_over_http() -> None:
    """A group is one request, whatever `batch` is; a mismatch is an error on both sides."""
    with served(f"{HERE}:place") as one:
        scores = ask(one.url, [grey(v) for v in (30, 10, 20)], True)
        assert [s.value for s in scores] == pytest.approx([2 / 3, 0, 1 / 3])
        assert scores[0].text == "[30, 10, 20]"
        (single,) = ask(one.url, [grey(1)], False)
        assert "set reward.remote.groupwise = true" in str(single.error)
        rows = json.dumps([{"prompt": "a", "text": ""}] * 2)
        for group, status in (("true", 200), ("false", 422), ("yes", 422)):
            parts = {"samples": (None, rows), "group": (None, group)}
            assert httpx.post(f"{one.url}/score", files=parts).status_code == status
        request = {"query": ["a"], "prompts": ["a"]}
        answer = httpx.post(f"{one.url}/get_reward", json=request)
        assert answer.status_code == 422 and "compares the samples" in answer.text
    with served(f"{HERE}:echo") as one:
        (score,) = ask(one.url, [grey(1)], True)
        assert "scores samples one by one" in str(score.error)


@pytest.mark.parametrize(
    "entry, expected",
    [
        ({"name": f"{HERE}:place"}, True),
        ({"name": f"{HERE}:Longest"}, True),
        ({"name": f"{HERE}:echo"}, False),
        ({"name": "diversity"}, True),
        ({"name": "ocr"}, False),
        ({"name": "deqa"}, False),
        ({"name": "mine", "remote": {"urls": ["http://x"]}}, False),
        ({"name": "mine", "remote": {"urls": ["http://x"], "groupwise": True}}, True),
        ({"name": "win-rate", "remote": {"urls": ["http://x"]}}, True),
    ],
)
def test_which_rewards_are_groupwise(entry: dict[str, Any], expected: bool) -> None:
    parsed = parse(RewardEntry, entry, "reward")
    assert assembly.is_groupwise(parsed) is expected
    if entry["name"] != "deqa":
        assert assembly.scorer(parsed).groupwise is expected


def test_rewards_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(
        "class Both:\n    def score(self, samples): ...\n    def score_group(self, samples): ...\n"
        "class None_: ...\n"
        "def trl(completions, **kwargs): ...\ntrl.groupwise = True\n"
    )
    for name, style, sentence in (
        ("Both", "gesso", "has both score and score_group; expected only one"),
        ("None_", "gesso", r"has no method score\(samples\), nor score_group\(samples\)"),
        ("trl", "trl", 'is groupwise, but style = "trl" scores samples one by one'),
    ):
        with pytest.raises(UserError, match=sentence):
            base.load(f"{tmp_path / 'both.py'}:{name}", {}, style=style)
    entry = {"name": "diversity", "remote": {"urls": ["http://x"], "protocol": "openrlhf"}}
    with pytest.raises(UserError, match=r'requires reward.remote.protocol = "gesso"'):
        assembly.is_groupwise(parse(RewardEntry, entry, "reward"))
    entry["remote"] |= {"groupwise": True}  # type: ignore[operator]
    with pytest.raises(UserError, match=r'groupwise requires protocol = "gesso"'):
        parse(RewardEntry, entry, "reward")


def test_diversity_of_images_and_texts() -> None:
    reward: Any = base.load(assembly.REWARDS["diversity"], {})
    values = [s.value for s in reward.score_group([grey(0), grey(51), grey(102)])]
    assert values == pytest.approx([0.3, 0.2, 0.3])
    assert [s.value for s in reward.score_group([grey(9)] * 3)] == [0.0] * 3
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    other = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    pair = [Sample(Prompt(""), image, 0) for image in (noise, other)]
    cells = [image.reshape(16, 4, 16, 4, 3).mean((1, 3)) / 255 for image in (noise, other)]
    expected = float(np.sqrt(np.square(cells[0] - cells[1]).mean()))
    assert reward.score_group(pair)[0].value == pytest.approx(expected, abs=2e-3)  # rounded cells
    scores = reward.score_group([text("a cat"), text("a dog")])
    assert [s.value for s in scores] == pytest.approx([2 / 3] * 2)
    (single,) = reward.score_group([grey(9)])
    assert single.error == "expected at least 2 samples of the prompt, got 1"


def place_recipe(data: dict, tmp_path: Path, **more: Any) -> dict:
    entry = {"name": f"{HERE}:place", "log": str(tmp_path / "log"), "cache": False}
    data["eval"] |= {"samples": 2, "every": 0, "prompts": 2, "steps": 2}
    data["algorithm"] |= {"steps": 2}
    data["sampler"] = {"batch": 2}  # cuts every group of 3
    jpeg = {"name": "jpeg-compressibility"}
    return data | {"reward": [jpeg, entry], "save": {"every": 2}} | more


def test_a_run(recipe_data: dict, tmp_path: Path) -> None:
    """Samples of a group reach the reward together and in order, in training, with a batch in
    flight, in evaluations and in `gesso eval`."""
    data = place_recipe(recipe_data, tmp_path, lag=1)
    finished = run.train(build.recipe_from(data), folder=tmp_path / "run", quiet=True)
    assert all(row["failed"] == 0 for row in finished.rows()[1:])
    log = tmp_path / "log"
    seen = {tuple(json.loads(line)) for line in log.read_text().splitlines()}
    training = {
        tuple(seed_of(0, "sample", step, i) for i in range(first, first + 3))
        for step in range(2)
        for first in (0, 3)
    }
    held_out = {tuple(eval_seed(0, i, j) for j in range(2)) for i in range(2)}
    assert seen == training | held_out
    shown = (finished.path / "samples" / "000000.jsonl").read_text().splitlines()
    assert [json.loads(line)["seed"] for line in shown] == [eval_seed(0, i, 0) for i in range(2)]

    (result,) = evaluate_all([find(finished.path)], EvaluationRequest())
    assert result.row == [0, 0, 1, 1] and len(result.scores) == 4
    expected = finished.rows()[-1][f"eval/{HERE}:place"]
    assert result.interval(f"{HERE}:place").mean == pytest.approx(expected)
    with pytest.raises(UserError, match=r"requires at least 2 of each, got n = 1; add --n 4"):
        evaluate_all([find(finished.path)], EvaluationRequest(n=1))


@pytest.mark.parametrize(
    "section, sentence",
    [
        ({"algorithm": {"group": 1}}, "use group = 2 or more"),
        ({"eval": {"samples": 1}}, "but evaluations have one: set eval.samples, as in 4"),
    ],
)
def test_groups_of_one_are_refused(
    recipe_data: dict, tmp_path: Path, section: dict[str, dict], sentence: str
) -> None:
    data = place_recipe(recipe_data, tmp_path)
    for key, values in section.items():
        data[key] |= values
    with pytest.raises(UserError, match=sentence):
        build.recipe_from(data)


def test_held_out_rewards_may_score_single_samples(recipe_data: dict, tmp_path: Path) -> None:
    data = place_recipe(recipe_data, tmp_path)
    data["eval"]["samples"] = 1
    build.recipe_from(data | {"eval_reward": [{"name": "jpeg-compressibility"}]})
    greedy = {"name": "remax", "max_tokens": 4}
    changed = {"model": {"name": "causal", "path": "x"}, "algorithm": greedy}
    data["eval"] = {"samples": 2, "temperature": 0.0}
    with pytest.raises(UserError, match=r"would give equal responses; set eval.temperature"):
        build.recipe_from(data | changed)
    data["eval"]["temperature"] = 1.0
    with pytest.raises(UserError, match=r'greedy baseline of algorithm "remax" is one response'):
        build.recipe_from(data | changed)

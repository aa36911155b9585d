"""Prompts drawn by the spread of their rewards: exact, forgetting none, and of use."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gesso import build, run
from gesso.data.curriculum import CurriculumStream, Spreads, draw_shares, stream_of
from gesso.data.prompts import Stream, WeightedPrompts
from gesso.types import Prompt, UserError
from tests.cut_run import cut_after
from tests.test_loop import comparable, final_state

FLOOR = 0.2


def named(letter: str, count: int) -> list[Prompt]:
    return [Prompt(f"{letter}{i}", where=f"f:{i}") for i in range(count)]


def curriculum(*parts: WeightedPrompts, seed: int = 0, lag: int = 0) -> CurriculumStream:
    return CurriculumStream(parts, seed, FLOOR, Spreads(lag))


def texts(prompts: Sequence[Prompt]) -> list[str]:
    return [prompt.text for prompt in prompts]


def test_shares_by_hand() -> None:
    assert draw_shares([1, 1, 1], [0.3, 0.1, 0.0], 0.3) == pytest.approx(
        [0.7 * 0.75 + 0.1, 0.7 * 0.25 + 0.1, 0.1]
    )
    unseen = draw_shares([1, 1, 1, 1], [0.4, None, 0.0, None], 0.2)  # as if they had .4
    assert unseen == pytest.approx([0.8 / 3 + 0.05, 0.8 / 3 + 0.05, 0.05, 0.8 / 3 + 0.05])
    assert draw_shares([1, 1], [0.0, None], 0.2) == pytest.approx([0.1, 0.9])
    assert draw_shares([1, 3], [0.0, 0.0], 0.2) == [0.25, 0.75]
    assert draw_shares([1, 3], [None, None], 0.2) == pytest.approx([0.25, 0.75])
    assert draw_shares([1, 3], [0.3, 0.1], 1.0) == pytest.approx([0.25, 0.75])
    assert sum(draw_shares([1, 2, 0.5], [0.1, None, 0.7], 0.2)) == pytest.approx(1)


def test_draws_follow_the_shares_and_are_distinct_within_a_batch() -> None:
    prompts = named("p", 4)
    stream = curriculum(WeightedPrompts(prompts))
    stream.observe(0, prompts, [0.6, 0.3, 0.1, 0.0])
    first = Counter(stream.batch(i, 1)[0].text for i in range(1, 4001))
    for prompt, share in zip(
        prompts, draw_shares([1] * 4, [0.6, 0.3, 0.1, 0.0], FLOOR), strict=True
    ):
        assert first[prompt.text] / 4000 == pytest.approx(share, abs=0.025)
    assert all(len(set(texts(stream.batch(5000 + i, 3)))) == 3 for i in range(50))
    assert Counter(texts(stream.batch(6000, 9))).most_common()[-1][1] == 2  # more than there are


def test_sources_alternate_as_without_a_curriculum() -> None:
    parts = [WeightedPrompts(named("a", 20), 3.0), WeightedPrompts(named("b", 20), 1.0)]
    stream, plain = curriculum(*parts), Stream(parts, 0)
    stream.observe(0, parts[0].prompts, [0.1] * 20)
    for i in range(1, 5):
        letters = [text[0] for text in texts(stream.batch(i, 8))]
        assert letters == [text[0] for text in texts(plain.batch(i, 8))]


@pytest.mark.parametrize("lag", [0, 2])
def test_a_batch_depends_on_earlier_steps_only_and_survives_a_checkpoint(lag: int) -> None:
    """The state after step s − 1, through JSON, gives batches s, s + 1, … of the undisturbed run;
    batch i uses the spreads of the steps up to i − 1 − lag."""
    prompts = named("p", 12)
    whole = curriculum(WeightedPrompts(prompts), seed=7, lag=lag)
    batches: list[list[str]] = []
    saved: dict[int, str] = {}
    for i in range(8):
        for ahead in range(len(batches), i + lag + 1):  # as the loop collects
            batches.append(texts(whole.batch(ahead, 4)))
        spreads = [random.Random(f"{i}{text}").random() for text in batches[i]]
        whole.observe(i, [Prompt(text) for text in batches[i]], spreads)
        saved[i + 1] = json.dumps(whole.state())
    for step, state in saved.items():
        resumed = curriculum(WeightedPrompts(prompts), seed=7, lag=lag)
        resumed.restore(json.loads(state))
        for i in range(step, min(step + lag + 1, len(batches))):
            assert texts(resumed.batch(i, 4)) == batches[i]
    late = curriculum(WeightedPrompts(prompts), lag=lag)
    late.observe(3, prompts, [0.5] * 12)
    late.batch(3 + lag, 4)
    assert math.isnan(late.metrics()["data/spread"])
    late.batch(4 + lag, 4)
    assert late.metrics() == {"data/seen": 1, "data/spread": 0.5, "data/expected_spread": 0.5}


def test_the_state_of_a_checkpoint_does_not_change_later() -> None:
    prompts = named("p", 3)
    stream = curriculum(WeightedPrompts(prompts))
    stream.observe(0, prompts, [0.1, 0.2, 0.3])
    state = stream.state()
    before = json.dumps(state)
    stream.observe(0, prompts, [0.9] * 3)
    stream.batch(5, 2)
    assert json.dumps(state) == before


def test_refills_have_other_prompts_by_the_same_spreads() -> None:
    prompts = named("p", 40)
    stream = curriculum(WeightedPrompts(prompts))
    stream.observe(0, prompts, [1.0] * 4 + [0.0] * 36)
    other = stream.other(99)
    assert texts(other.batch(1, 4)) != texts(stream.batch(1, 4))
    drawn = Counter(p.text for i in range(1, 200) for p in other.batch(i, 1))
    assert sum(drawn[f"p{i}"] for i in range(4)) > 140


def simulated(stream: Stream, steps: int, seed: int) -> tuple[float, float]:
    """A model whose chance to solve a prompt rises when its group has spread. Of 200 prompts 80%
    start solved or hopeless. Returns the share of flat groups over the run, and the mean chance at
    the end on the other prompts."""
    rng = random.Random(seed)
    skill = {f"p{i}": 9.0 if i % 5 < 2 else -9.0 if i % 5 < 4 else -2.5 for i in range(200)}
    flat = 0
    for step in range(steps):
        prompts = stream.batch(step, 8)
        spreads = []
        for prompt in prompts:
            chance = 1 / (1 + math.exp(-skill[prompt.text]))
            spread = statistics.pstdev(float(rng.random() < chance) for _ in range(8))
            flat += spread == 0
            spreads.append(spread)
            skill[prompt.text] += 2 * spread
        stream.observe(step, prompts, spreads)
    between = [1 / (1 + math.exp(-skill[f"p{i}"])) for i in range(4, 200, 5)]
    return flat / (8 * steps), statistics.fmean(between)


def test_it_helps_where_most_prompts_teach_nothing() -> None:
    parts = [WeightedPrompts(named("p", 200))]
    plain = [simulated(Stream(parts, seed), 100, seed) for seed in range(3)]
    drawn = [simulated(curriculum(*parts, seed=seed), 100, seed) for seed in range(3)]
    for (flat, solved), (flat_drawn, solved_drawn) in zip(plain, drawn, strict=True):
        assert flat > 0.85 and flat_drawn < 0.8
        assert solved < 0.45 and solved_drawn > 0.6


def test_settings(recipe_data: dict[str, Any]) -> None:
    def recipe(**data: Any) -> Any:
        return build.recipe_from(recipe_data | {"data": recipe_data["data"] | data})

    assert recipe().data.curriculum is None
    assert recipe(curriculum="spread").data.curriculum.floor == 0.2
    assert recipe(curriculum={"floor": 0.5}).data.curriculum.floor == 0.5
    filled = recipe(curriculum="spread")
    assert build.recipe_from(filled.model_dump()) == filled
    with pytest.raises(UserError, match='expected "spread" or a table, got "hard"'):
        recipe(curriculum="hard")
    with pytest.raises(UserError, match="floor"):
        recipe(curriculum={"floor": 0.0})
    recipe_data["algorithm"]["group"] = 1
    with pytest.raises(UserError, match="use group = 2 or more"):
        recipe(curriculum="spread")


def test_a_resumed_run_ends_the_same(recipe_data: dict[str, Any], tmp_path: Path) -> None:
    """The spreads are in the checkpoint: batches after a resume depend on batches before it."""
    recipe_data["data"] |= {"curriculum": {"floor": 0.05}}
    recipe_data["algorithm"] |= {"steps": 2}
    recipe_data |= {"steps": 4, "eval": {"every": 0, "prompts": 2, "steps": 2}}
    recipe_data["save"] = {"every": 2, "keep": 9}
    recipe = build.recipe_from(recipe_data)
    assert isinstance(stream_of([WeightedPrompts([Prompt("a")])], recipe), CurriculumStream)
    whole = run.train(recipe, folder=tmp_path / "whole", quiet=True)
    rows = whole.rows()[1:]
    assert [row["data/seen"] for row in rows] == [0, *([2 / 3, 1, 1])]
    saved = whole.meta(2)["curriculum"]
    assert len(saved["known"]) == 2 and len(saved["recent"]["1"]) == 2
    cut = cut_after(whole, 2, tmp_path / "cut")
    again = run.resume(cut, quiet=True)
    assert comparable(again.rows()) == comparable(whole.rows())
    one, two = final_state(whole.path), final_state(again.path)
    assert all(torch.equal(one[name], two[name]) for name in one)

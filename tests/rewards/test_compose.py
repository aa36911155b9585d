"""Several rewards at once: some that do not apply, some only for evaluation."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from gesso import build, run
from gesso.config import Ramp
from gesso.health import Facts
from gesso.rewards import assembly, base
from gesso.rewards.compose import clipped, combine
from gesso.rewards.transport import protocol, wire
from gesso.track.run_folder import RunFolder
from gesso.types import Prompt, Sample, Score, UserError
from tests.cut_run import cut_after
from tests.rollouts import scored_rollout

USER = "tests.rewards.user_rewards"
NOT_APPLICABLE = Score(None)


def test_none_is_neither_a_failure_nor_a_number() -> None:
    assert base.plain(None) == base.plain(Score(None)) == NOT_APPLICABLE
    assert not NOT_APPLICABLE.ok and NOT_APPLICABLE.error is None
    assert wire.read_scores(wire.pack_scores([NOT_APPLICABLE])) == [NOT_APPLICABLE]
    assert protocol.read_scores(protocol.pack_scores([NOT_APPLICABLE]), 1) == [NOT_APPLICABLE]
    (half,) = protocol.read_scores({"scores": [{"parts": {}}]}, 1)  # incomplete: a failure
    assert half.error and "value" in half.error


def test_the_sum_is_over_the_rewards_that_apply() -> None:
    one, two = Score(0.5, {"exact": 1.0}, "read KITE"), Score(0.25)
    both = combine([("ocr", 2.0, one), ("jpeg", 4.0, two)])
    assert both.value == 2.0 and both.parts == {"ocr": 0.5, "ocr/exact": 1.0, "jpeg": 0.25}
    alone = combine([("ocr", 2.0, one), ("geneval", 4.0, NOT_APPLICABLE)])
    assert alone.value == 1.0 and alone.parts == {"ocr": 0.5, "ocr/exact": 1.0}
    failed = combine([("ocr", 2.0, one), ("geneval", 4.0, Score.failed("no server"))])
    assert not failed.ok and failed.error == "geneval: no server" and failed.value is None
    assert failed.parts == alone.parts  # `gesso sample` shows them
    none = combine([("ocr", 1.0, NOT_APPLICABLE), ("geneval", 1.0, NOT_APPLICABLE)])
    assert not none.ok and none.error == "ocr, geneval: no reward applies to this sample"


def test_components_are_nan_where_a_reward_does_not_apply() -> None:
    rollout = scored_rollout([[1.0, 2.0], [3.0, 4.0]], [0, 0])
    rollout.scores[1].parts.pop("0")  # type: ignore[attr-defined]
    assert math.isnan(rollout.components[1, 0])
    assert rollout.components[[0, 0, 1], [0, 1, 1]].tolist() == [1.0, 2.0, 4.0]


def rows_of(data: dict, folder: Path) -> list[dict]:
    run.train(build.recipe_from(data), folder=folder, quiet=True)
    return RunFolder.open(folder).rows()


def test_a_reward_for_some_prompts_only(recipe_data: dict, tmp_path: Path) -> None:
    """Prompts of two kinds in a batch: each is scored by the rewards that apply to it."""
    recipe_data["reward"] = [
        {"name": f"{USER}:of_words", "word": "KITE"},
        {"name": f"{USER}:brightness"},
    ]
    recipe_data["data"]["groups"] = 3
    recipe_data["steps"] = 1
    rows = rows_of(recipe_data, tmp_path / "run")
    assert rows[1]["failed"] == 0
    file = tmp_path / "run" / "samples" / "000000.jsonl"
    for row in map(json.loads, file.read_text().splitlines()):
        assert (f"{USER}:of_words" in row["parts"]) == ("KITE" in row["prompt"])
        assert row["reward"] == pytest.approx(sum(row["parts"].values()))


def test_evaluation_has_separate_rewards(recipe_data: dict, tmp_path: Path) -> None:
    recipe_data["steps"] = 1
    recipe_data["eval_reward"] = [
        {"name": "jpeg-compressibility", "weight": 2.0},
        {"name": f"{USER}:constant", "value": 0.25},
    ]
    rows = rows_of(recipe_data, tmp_path / "run")
    held_out = rows[0]
    assert held_out[f"eval/{USER}:constant"] == 0.25
    expected = 2 * held_out["eval/jpeg-compressibility"] + 0.25
    assert held_out["eval/reward"] == pytest.approx(expected)
    assert f"reward/{USER}:constant" not in rows[1]  # not trained on
    assert rows[1]["reward"] == rows[1]["reward/jpeg-compressibility"]
    again = run.recipe_of(RunFolder.open(tmp_path / "run"))
    assert [e.name for e in again.eval_reward] == ["jpeg-compressibility", f"{USER}:constant"]


def test_a_reward_of_both_purposes_runs_once(recipe_data: dict) -> None:
    alike = {"name": "jpeg-compressibility", "weight": 3.0}
    recipe_data["eval_reward"] = [alike, {"name": f"{USER}:constant", "value": 1.0}]
    rewards = assembly.rewards(build.recipe_from(recipe_data))
    try:
        service = rewards.service
        assert service.held_out[0].scorer is service.rewards[0].scorer
        assert (service.rewards[0].weight, service.held_out[0].weight) == (1.0, 3.0)
        assert service.processes == 1  # of the training batch
    finally:
        rewards.service.close()


def test_each_purpose_checks_its_prompts(recipe_data: dict, tmp_path: Path) -> None:
    unquoted = tmp_path / "plain.txt"
    unquoted.write_text("a red sign\na blue sign\n")
    recipe_data["data"]["train"] = str(unquoted)
    recipe_data["eval_reward"] = [{"name": "ocr", "detect": False}]
    job = run.assemble(build.recipe_from(recipe_data))  # OCR could not score the training prompts
    job.close()
    recipe_data["reward"], recipe_data["eval_reward"] = recipe_data["eval_reward"], []
    with pytest.raises(UserError, match="expected a double-quoted text"):
        run.assemble(build.recipe_from(recipe_data))


def test_servers_and_judges_use_no_process(recipe_data: dict) -> None:
    remote = {"urls": ["http://127.0.0.1:9"]}
    recipe_data["reward"] = [
        {"name": "ocr", "remote": remote, "workers": 5},
        {"name": "jpeg-compressibility", "workers": 2},
    ]
    rewards = assembly.rewards(build.recipe_from(recipe_data))
    try:
        assert rewards.service.processes == 2
    finally:
        rewards.service.close()


def test_a_reward_listed_twice(recipe_data: dict) -> None:
    recipe_data["eval_reward"] = [{"name": "jpeg-compressibility"}] * 2
    with pytest.raises(UserError, match='eval_reward "jpeg-compressibility" is listed twice'):
        build.recipe_from(recipe_data)


def test_an_alias_names_the_second_entry(recipe_data: dict) -> None:
    jpeg = {"name": "jpeg-compressibility"}
    recipe_data["reward"] = [jpeg, jpeg | {"alias": "small", "bounds": [-1e-9, 0.0]}]
    recipe_data["eval_reward"] = [jpeg | {"alias": "held-out"}]
    recipe = build.recipe_from(recipe_data)
    watched = Facts.of(recipe, build.algorithm(recipe), 8).watched
    assert watched == ("eval/reward", "eval/held-out", "eval/held-out/exact")
    rewards = assembly.rewards(recipe)
    try:
        image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
        (score,) = rewards.service.score([Sample(Prompt("a"), image, 0)])
        assert score.parts["small"] == -1e-9 > score.parts["jpeg-compressibility"]
    finally:
        rewards.service.close()


@pytest.mark.parametrize(
    "alias, message", [("a/b", 'has no "/"'), ("failed", "is reserved"), ("", "at least 1")]
)
def test_aliases_that_cannot_be_metrics(recipe_data: dict, alias: str, message: str) -> None:
    recipe_data["reward"] = [{"name": "jpeg-compressibility", "alias": alias}]
    with pytest.raises(UserError, match=message):
        build.recipe_from(recipe_data)


def test_cache_hits_are_logged(recipe_data: dict, tmp_path: Path) -> None:
    """With a learning rate of 0 every evaluation samples the same images: scored once."""
    recipe_data["optimizer"] = {"lr": 0.0}
    recipe_data["eval"]["every"] = 1
    recipe_data["steps"] = 3
    rows = rows_of(recipe_data, tmp_path / "run")
    # the evaluation after step 1 repeats that of step 0; its hits are in the next row
    assert [row.get("cached") for row in rows] == [None, 0, 3, 3]


def test_gdpo_ignores_rewards_that_do_not_apply() -> None:
    from gesso.algorithms.advantage import Advantage

    nan = math.nan
    partly = scored_rollout([[1.0, 5.0], [2.0, 9.0], [nan, 1.0], [nan, 3.0]], [0, 0, 1, 1])
    advantages = Advantage(combine="gdpo")(partly)
    first = torch.tensor([-1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    second = torch.tensor([-1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    total = first + second
    expected = (total - total.mean()) / total.std(correction=0)
    torch.testing.assert_close(advantages, expected, atol=2e-3, rtol=0)
    kept = Advantage(combine="gdpo", drop_flat=True).kept(
        scored_rollout([[nan, 1.0], [nan, 1.0], [nan, 1.0], [nan, 3.0]], [0, 0, 1, 1]), 1
    )
    assert kept.tolist() == [2, 3]


def test_a_prompt_is_unfit_if_a_reward_rejects_it() -> None:
    check = assembly.PromptCheck({"ocr": base.load(assembly.REWARDS["ocr"], {"detect": False})})
    expected = 'ocr: expected a double-quoted text in the prompt, or a column "target"'
    assert check.unfit(Prompt("a sign")) == expected


@pytest.mark.parametrize("value, expected", [(-3.0, -1.0), (0.25, 0.25), (7.0, 2.0)])
def test_values_are_clipped_to_their_bounds(value: float, expected: float) -> None:
    score = clipped(Score(value, {"exact": 1.0}), (-1.0, 2.0))
    assert score.value == expected and score.parts == {"exact": 1.0, "unclipped": value}
    assert clipped(Score(value), None) == Score(value)
    assert clipped(NOT_APPLICABLE, (0.0, 1.0)) == NOT_APPLICABLE
    assert clipped(Score.failed("no"), (0.0, 1.0)) == Score.failed("no")


def test_bounds_of_a_recipe(recipe_data: dict, tmp_path: Path) -> None:
    """Of the training reward alone: both share a scorer."""
    mine = {"name": f"{USER}:brightness"}
    recipe_data |= {"steps": 1, "reward": [mine | {"bounds": [0.0, 1e-3]}], "eval_reward": [mine]}
    last = rows_of(recipe_data, tmp_path / "run")[-1]
    name = f"reward/{USER}:brightness"
    assert last["reward"] == last[name] == pytest.approx(1e-3)
    assert last[f"{name}/unclipped"] > 1e-3
    assert last["eval/reward"] > 1e-3
    with pytest.raises(UserError, match=r"bounds = \[1.0, 0.0\]: expected the lower bound first"):
        build.recipe_from(recipe_data | {"reward": [mine | {"bounds": [1.0, 0.0]}]})


def test_a_ramp_changes_the_weight_of_each_batch(recipe_data: dict, tmp_path: Path) -> None:
    """By the batch's own step, also when the next batch is scored during an update, and after a
    resume; evaluations have the whole weight."""
    other = {"name": "jpeg-incompressibility", "alias": "large", "weight": 3.0}
    other |= {"ramp": {"start": 0.5, "steps": 2}}
    recipe_data["reward"] = [{"name": "jpeg-compressibility"}, other]
    recipe_data |= {"steps": 4, "lag": 1, "save": {"every": 1, "keep": 9}}
    done = run.train(build.recipe_from(recipe_data), folder=tmp_path / "run", quiet=True)
    rows = [*done.rows()[1:3], *run.resume(cut_after(done, 2, tmp_path / "cut"), True).rows()[3:]]
    weights = [row["reward/large/weight"] for row in rows]
    assert weights == [1.5, 2.25, 3.0, 3.0]
    for row, weight in zip(rows, weights, strict=True):
        parts = row["reward/jpeg-compressibility"], row["reward/large"]
        assert row["reward"] == pytest.approx(parts[0] + weight * parts[1])
    first = done.rows()[0]
    whole = first["eval/jpeg-compressibility"] + 3.0 * first["eval/large"]
    assert first["eval/reward"] == pytest.approx(whole)


def test_a_ramp_ends() -> None:
    ramp = Ramp(start=1.0, end=0.25, steps=3)
    assert [ramp.at(step) for step in (0, 1, 3, 100)] == [1.0, 0.75, 0.25, 0.25]


def test_evaluations_have_no_ramp(recipe_data: dict) -> None:
    recipe_data["eval_reward"] = [{"name": "jpeg-compressibility", "ramp": {"steps": 2}}]
    with pytest.raises(UserError, match="evaluations have no ramp; remove it"):
        build.recipe_from(recipe_data)

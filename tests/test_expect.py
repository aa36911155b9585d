"""`expect`: what the authors of a recipe report, and how far a run is from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from gesso import build, commands
from gesso.config import Expect, tables
from gesso.types import UserError
from gesso.use.evaluate import Evaluation, table
from gesso.viewer.reading import RunReader
from tests.rollouts import scored_rollout
from tests.viewer import folders
from tools import reference

EXPECT: dict[str, Any] = {
    "source": "a paper, table 1",
    "metric": "eval/ocr",
    "value": 0.92,
    "start": 0.59,
}
WITH = [n for n in tables.bundled_recipes() if "expect" in tables.read_recipe(n).recipe]


def test_recipes_have_figures() -> None:
    assert {"sd35-ocr", "sd35-geneval", "sd35-geneval-nft", "sd35-pickscore-dgpo"} <= set(WITH)


@pytest.mark.parametrize("name", WITH)
def test_expected_metrics_are_those_of_the_recipe(name: str) -> None:
    recipe = build.recipe(name)  # refuses other rewards
    assert recipe.expect is not None
    assert recipe.expect.start is None or recipe.expect.start < recipe.expect.value
    if "/" in recipe.expect.figure:
        assert f"`{recipe.expect.figure}`" in reference.PAGES["rewards.md"]()
    assert all(0 < int(step) <= recipe.steps for step in recipe.expect.points)


def test_a_recipe_does_not_inherit_what_its_base_expects(tmp_path: Path) -> None:
    assert "expect" not in tables.read_recipe("sd35-ocr-guard").recipe
    own = tmp_path / "own.toml"
    own.write_text('base = "sd35-ocr"\nabout = "x"\n', encoding="utf-8")
    assert build.recipe(str(own)).expect is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"metric": "eval/hps"}, 'expect.metric = "eval/hps" is not a metric of its evaluations'),
        ({"points": {"soon": 0.1}}, 'points: expected steps, as in .* got "soon"'),
        ({"value": "high"}, "expect.value"),
    ],
)
def test_wrong_figures_are_refused(recipe_data: dict, changes: dict, message: str) -> None:
    ours = EXPECT | {"metric": "eval/jpeg-compressibility"}
    assert build.recipe_from(recipe_data | {"expect": ours}).expect == Expect(**ours)
    with pytest.raises(UserError, match=message):
        build.recipe_from(recipe_data | {"expect": ours | changes})


def test_eval_reports_the_distance() -> None:
    rollout = scored_rollout([[0.5], [1.0]], [0, 1])
    prompts = [sample.prompt for sample in rollout.samples]
    found = Evaluation("run", prompts, rollout.samples, rollout.scores, [0, 1])
    expect = Expect(source="a paper", metric="eval/0", value=0.92, start=0.5)
    line = "0 0.750, 0.170 below the authors' 0.5 → 0.92 (a paper)"
    assert table([found], expect).splitlines()[-1] == line
    other = expect.model_copy(update={"metric": "eval/hps"})
    assert "authors" not in table([found], other) and "authors" not in table([found])


def test_the_end_of_training_reports_the_distance(recipe_data: dict, tmp_path: Path) -> None:
    data = recipe_data | {"expect": EXPECT | {"metric": "eval/reward"}}
    rows = [{"step": 0, "eval/reward": 0.5}, {"step": 2, "eval/reward": 1.0}]
    text, _ = commands._summary(tmp_path, rows, build.recipe_from(data))
    assert "reward 1.000, 0.080 above the authors' 0.59 → 0.92 (a paper, table 1)" in text


def test_the_viewer_reads_what_is_expected(tmp_path: Path) -> None:
    points = {"1000": 0.9, "200": 0.7}
    folders.make(tmp_path / "run", 2, expect=EXPECT | {"points": points})
    found = RunReader(tmp_path / "run").details()["expect"]
    assert (found["steps"], found["values"]) == ([0, 200, 1000], [0.59, 0.7, 0.9])
    assert found["value"] == 0.92 and found["metric"] == "eval/ocr"
    broken = tmp_path / "broken"
    folders.make(broken, 2)
    (broken / "config.toml").write_text(tomli_w.dumps({"steps": 2, "expect": {"value": 1}}))
    assert RunReader(broken).details()["expect"] is None

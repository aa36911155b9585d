"""Samplers on devices of their own: the same run, and what travels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gesso import build, run
from gesso.cluster import ray_nodes
from gesso.cluster.placement import OnRay, Placement, place_again
from gesso.types import StopRun
from tests.cluster.pools import MOST
from tests.cluster.runs import assert_equal, go, language_recipe
from tests.conftest import small_recipe
from tests.cut_run import cut_after


def recipes(pipeline_folder: Path, prompt_file: Path, language: Path) -> dict[str, dict[str, Any]]:
    """DiffusionNFT samples with "old" and evaluates "ema"; PPO has a critic; a full fine-tune
    publishes every weight."""
    nft = small_recipe(pipeline_folder, prompt_file) | {"steps": 2}
    nft["algorithm"] = {"name": "diffusion-nft", "group": 3, "steps": 2, "times": 2, "updates": 2}
    nft["learner"] = {"micro_batch": 2, "ema": {"every": 1, "decay": 0.5}}
    nft["sampler"] = {"batch": 1}
    return {
        "diffusion-nft": nft,
        "ppo": language_recipe(language, {"name": "ppo"}),
        "refills": language_recipe(language, {"name": "dapo", "updates": 1, "refills": 2})
        | {"reward": [{"name": "tests.token_rewards:length"}]},
    }


@pytest.mark.usefixtures("borrowing")
@pytest.mark.parametrize(
    ("name", "learners", "samplers"), [("diffusion-nft", 1, 2), ("ppo", 2, 2), ("refills", 1, 1)]
)
def test_samplers_apart_do_not_change_a_bit(
    pipeline_folder: Path,
    prompt_file: Path,
    language: Path,
    tmp_path: Path,
    name: str,
    learners: int,
    samplers: int,
) -> None:
    data = recipes(pipeline_folder, prompt_file, language)[name]
    alone = go(data, tmp_path / "alone")
    apart = go(data, tmp_path / "apart", learners, samplers=samplers)
    assert_equal(alone, apart)
    row = apart.rows()[-1]
    assert row["cluster/weights_gb"] > 0 and row["cluster/sent_gb"] > 0
    assert len([key for key in row if key.startswith("cluster/idle/")]) == learners + samplers


@pytest.mark.usefixtures("borrowing")
def test_samplers_apart_of_learners_that_divide_all_weights(
    pipeline_folder: Path, prompt_file: Path, language: Path, tmp_path: Path
) -> None:
    """In two groups; the sampler has them whole. Resumed with a batch in flight, whose weights the
    learners kept."""
    data = recipes(pipeline_folder, prompt_file, language)["diffusion-nft"] | {"lag": 1}
    data["save"] = {"every": 1, "keep": 9}
    together = go(data, tmp_path / "together", MOST, sharding="all", shard_within=2)
    cut = cut_after(together, 1, tmp_path / "apart")
    apart = run.resume(cut, quiet=True, overrides=["cluster.samplers=1"])
    assert_equal(together, apart)
    assert apart.rows()[-1]["cluster/weights_gb"] > 0


@pytest.mark.usefixtures("borrowing")
@pytest.mark.parametrize("name", ["diffusion-nft", "ppo"])
def test_at_any_lag_a_resumed_run_ends_the_same(
    pipeline_folder: Path, prompt_file: Path, language: Path, tmp_path: Path, name: str
) -> None:
    """Cut at a step with two batches in flight. In one process they are sampled before the update,
    by samplers apart during it."""
    data = recipes(pipeline_folder, prompt_file, language)[name] | {"lag": 2, "steps": 5}
    data["save"] = {"every": 1, "keep": 9}
    data["eval"]["every"] = 1
    whole = go(data, tmp_path / "alone")
    assert [row["age"] for row in whole.rows()[1:]] == [0, 1, 2, 2, 2]
    for where, cluster in {"alone": [], "apart": ["workers=1", "samplers=2"]}.items():
        cut = cut_after(whole, 3, tmp_path / f"resumed {where}")
        again = run.resume(cut, quiet=True, overrides=[f"cluster.{each}" for each in cluster])
        assert_equal(whole, again)


def test_fewer_samplers_on_the_nodes_of_a_ray_cluster_that_are_left(
    language: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = build.recipe_from(language_recipe(language, {"name": "grpo"}))
    before = Placement(5, (), 1, 6, 2, on_ray=OnRay("auto", False, 5), samplers=3)

    class Near(ray_nodes.Node):
        def reachable(self) -> bool:
            return True

    def left(count: int) -> Placement:
        nodes = [Near("127.0.0.1", 1, 1, 0)] * count
        monkeypatch.setattr(ray_nodes, "nodes", lambda address: nodes)
        return place_again(before, recipe)

    found = [left(count) for count in (6, 4, 3, 2)]
    assert [(p.workers, p.samplers, p.sharded) for p in found] == [
        (5, 3, 2),
        (4, 2, 2),
        (3, 1, 2),
        (2, 1, 1),
    ]
    with pytest.raises(StopRun, match="can run 1 workers, but at least 1 to train and 1 to sample"):
        left(1)

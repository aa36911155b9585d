"""`on_symptom`: what a run does about its health warnings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gesso import build, health, run
from gesso.config import schema
from gesso.health.reactions import best_step, rescaled
from gesso.track.run_folder import RunFolder
from gesso.types import Scales, StopRun, UserError
from tests.cut_run import cut_after
from tests.rollouts import parts_of, rollout_of

KINDS = set(health.CHECKS)


def test_reactions_know_every_warning() -> None:
    assert set(schema.WARNINGS) == KINDS


def read(done: RunFolder) -> list[torch.Tensor]:
    files = sorted(done.checkpoint(4).glob("*.safetensors"))
    assert files
    return [tensor for file in files for tensor in load_file(file).values()]


@pytest.fixture(autouse=True)
def symptoms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning after step 2, and no other."""

    def fires(rows: Sequence[Any], facts: Any) -> str | None:
        return "too similar" if rows[-1]["step"] == 2 else None

    monkeypatch.setattr(health, "CHECKS", {"diversity": fires, "reward-hacking": lambda *_: None})


def reacting(recipe_data: dict, reaction: str) -> dict:
    recipe_data |= {"steps": 4, "on_symptom": {"diversity": reaction}}
    recipe_data["algorithm"] |= {"beta": 0.1}
    recipe_data["save"] = {"every": 1, "keep": 9}
    return recipe_data


def test_the_learning_rate_is_halved_after_the_warning(recipe_data: dict, tmp_path: Path) -> None:
    """Also in a run that was resumed after it."""
    data = reacting(recipe_data, "lower_lr")
    done = run.train(build.recipe_from(data), folder=tmp_path / "run", quiet=True)
    rates = [row["update/lr"] for row in done.rows()[1:]]
    assert rates == [rates[0], rates[0], rates[0] / 2, rates[0] / 2]
    assert "on_symptom.diversity: from the next step on, optimizer.lr is multiplied by 0.5" in (
        done.path / "log.txt"
    ).read_text(encoding="utf-8")
    resumed = run.resume(cut_after(done, 3, tmp_path / "cut"), quiet=True)
    assert [row["update/lr"] for row in resumed.rows()[1:]] == rates
    one, other = (torch.cat([t.flatten() for t in read(each)]) for each in (done, resumed))
    assert one.equal(other)


def test_a_stopped_run_is_saved_and_can_go_on(recipe_data: dict, tmp_path: Path) -> None:
    data = reacting(recipe_data, "stop")
    message = r"stopped the run at step 2 because of diversity; the held-out reward was highest at"
    with pytest.raises(StopRun, match=message):
        run.train(build.recipe_from(data), folder=tmp_path / "run", quiet=True)
    resumed = run.resume(tmp_path / "run", quiet=True)
    assert [row["step"] for row in resumed.rows()] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "flow-grpo", "beta": 0.1, "group": 3, "steps": 2, "updates": 1},
        {"name": "diffusion-nft", "kl": 0.1, "group": 3, "steps": 2, "times": 2, "updates": 1},
    ],
)
def test_raising_the_kl_doubles_its_weight(recipe_data: dict, algorithm: dict) -> None:
    key = "beta" if "beta" in algorithm else "kl"
    norms: dict[str, list[float]] = defaultdict(list)
    for name, weight, factor in (("as it is", 0.1, 1.0), ("raised", 0.1, 2.0), ("twice", 0.2, 1.0)):
        data = recipe_data | {"algorithm": algorithm | {key: weight}}
        model, chosen, learner = parts_of(build.recipe_from(data))
        rollout = rollout_of(model, chosen)
        for step in range(2):  # at first the policy is the reference
            metrics = learner.update(rollout, step, Scales(kl=factor)).metrics
            norms[name].append(metrics["update/grad_norm"])
        assert learner.algorithm is chosen
    assert norms["raised"] == norms["twice"] != norms["as it is"]


def test_scales_multiply() -> None:
    scales = rescaled(Scales(), ["lower_lr", "stop", "raise_kl", "lower_lr"])
    assert scales == Scales(lr=0.25, kl=2.0)


def test_the_best_step_is_the_first_of_equal_ones() -> None:
    rows: list[dict[str, Any]] = [{"step": 0, "eval/reward": 0.1}, {"step": 1}]
    rows += [{"step": 2, "eval/reward": 0.4}]
    assert best_step([*rows, {"step": 4, "eval/reward": 0.4}]) == 2
    assert best_step([{"step": 1}]) is None


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"on_symptom": {"diversty": "stop"}},
            'unknown warning "diversty"; did you mean "diversity"',
        ),
        ({"on_symptom": {"diversity": "halt"}}, 'diversity: expected .*raise_kl, got "halt"'),
        ({"on_symptom": 5}, "expected one of stop, lower_lr, raise_kl, or a table"),
        ({"on_symptom": {"kl-explodes": "stop"}}, "which is for language models; remove it"),
        ({"on_symptom": {"idle-workers": "stop"}}, "which is for several workers; remove it"),
        ({"on_symptom": "stop", "eval": {"every": 0}}, "compares evaluations; set eval.every"),
        ({"on_symptom": {"diversity": "raise_kl"}}, 'algorithm "flow-grpo" has no KL here'),
    ],
)
def test_reactions_that_cannot_happen(recipe_data: dict, changes: dict, message: str) -> None:
    recipe_data["algorithm"] |= {"beta": 0.0}
    with pytest.raises(UserError, match=message):
        build.recipe_from(recipe_data | changes)


def test_a_reaction_alone_is_to_reward_hacking(recipe_data: dict) -> None:
    recipe = build.recipe_from(recipe_data | {"on_symptom": "stop", "eval": {"every": 1}})
    assert recipe.on_symptom == {"reward-hacking": "stop"}


def test_there_is_no_reaction_after_the_last_step(recipe_data: dict, tmp_path: Path) -> None:
    data = reacting(recipe_data, "stop") | {"steps": 2}
    done = run.train(build.recipe_from(data), folder=tmp_path / "run", quiet=True)
    assert done.rows()[-1]["health"] == ["diversity"]
    assert "on_symptom" not in (done.path / "log.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "recipe, change, sentence",
    [
        ("demo-sft", "on_symptom=stop", "which is for generated training samples"),
        ("demo-dgpo", "on_symptom.clip-under-floor=stop", "clips no ratio; remove it"),
        ("demo-draft", "on_symptom=raise_kl", "or use stop or lower_lr"),
    ],
)
def test_reactions_that_a_bundled_recipe_cannot_have(
    recipe: str, change: str, sentence: str
) -> None:
    with pytest.raises(UserError) as error:
        build.recipe(recipe, [change])
    assert sentence in str(error.value)

from __future__ import annotations

import re
from pathlib import Path

import pydantic
import pytest

from gesso import build, families
from gesso.config import tables
from gesso.types import UserError

BAD = [
    ("optimizer.lrr=1", 'unknown key "optimizer.lrr"; did you mean "lr"? allowed: lr, betas'),
    ("stepz=1", 'unknown key "stepz"; did you mean "steps"?'),
    ("steps=many", "\"steps\" = 'many' is not valid; expected an integer"),
    ("steps=1.5", '"steps" = 1.5 is not valid'),
    ("steps=-1", "greater than or equal to 0"),
    ("model.dtype=int8", "expected one of 'float32', 'bfloat16', 'float16'"),
    ("algorithm.name=flow-grop", 'unknown algorithm "flow-grop"; did you mean "flow-grpo"?'),
    ("algorithm.grop=3", 'algorithm flow-grpo: unknown key "grop"; did you mean "group"?'),
    ("algorithm.rule=ddim", "expected one of 'flow-sde', 'cps'"),
    ("algorithm.window.size=9", "does not fit into 6 steps; low + size <= high <= steps"),
    ("algorithm.noise=0", "noise = 0 makes every step deterministic"),
    ("model.name=sd9", 'unknown model "sd9"; did you mean "sd3"?'),
    ("reward.0.detekt=true", 'reward ocr: unknown key "detekt"; did you mean "detect"?'),
    ("reward.0.name=5", '"reward.0.name" = 5 is not valid'),
    ("reward=[]", "at least 1 item"),
    ("model.lora.rank=x", '"model.lora.rank"'),
    ("optimizer.lr=inf", "finite number"),
    ("optimizer.betas=[2.0, 0.9]", "less than 1"),
    ("reward.0.weight=nan", "finite number"),
    ("nokey", "expected key=value"),
    ("steps.deep=3", "is a value, not a table"),
    ("reward.7.weight=1", 'no table or list entry "7"'),
]

BAD_OF_WRITERS = [
    ("model.name=causl", 'unknown model "causl"; did you mean "causal"?'),
    ("model.name=5", '"model.name" = 5 is not valid; expected a string in quotes'),
    ("model.max_promt=3", 'unknown key "model.max_promt"; did you mean "max_prompt"?'),
    ("algorithm.surrogate.lwo=1", 'unknown key "surrogate.lwo"; did you mean "low"?'),
    ("algorithm.surrogate.clip=1", 'unknown key "surrogate.clip"; allowed: kind, low, high, dual'),
    ("algorithm.surrogate.draws=1", 'unknown key "surrogate.draws"; allowed: kind, low, high'),
    ('algorithm.surrogate={kind="sequence", dual=3}', '"surrogate.dual"; allowed: kind, low, high'),
    (
        "algorithm.surrogate.low=2",
        '"surrogate.low" = 2 is not valid; expected a number less than 1',
    ),
    ("algorithm.surrogate.kind=clipp", "expected tags: 'clip', 'sequence', 'weight'"),
]


@pytest.mark.parametrize(
    "name, override, sentence",
    [*(("demo", *each) for each in BAD), *(("demo-vlm", *each) for each in BAD_OF_WRITERS)],
)
def test_every_mistake_is_one_sentence(name: str, override: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        build.model(build.recipe(name, [override]))
    message = str(caught.value)
    assert sentence in message
    assert "\n" not in message and len(message) < 500


def test_impossible_combinations() -> None:
    cps = ["algorithm.window=none", "algorithm.rule=cps", "algorithm.timestep_fraction=1.0"]
    with pytest.raises(UserError, match="last CPS step has no noise"):
        build.recipe("demo", cps)
    with pytest.raises(UserError, match="is less than one step"):
        build.recipe("demo", ["algorithm.window=none", "algorithm.timestep_fraction=0.1"])
    with pytest.raises(UserError, match="must be at most 3, the number of steps"):
        build.recipe("demo", ['algorithm={name="diffusion-nft", steps=3, times=4}'])
    with pytest.raises(UserError, match="listed twice"):
        build.recipe("demo", ['reward=[{name="ocr"}, {name="ocr"}]'])


def test_evaluation_is_guided_as_training_by_default() -> None:
    assert build.recipe("demo", ["algorithm.guidance=3.0"]).eval.guidance == 3.0
    assert build.recipe("demo", ["eval.guidance=2.0"]).eval.guidance == 2.0
    assert build.recipe("demo-nft").eval.guidance == 1.0


def test_overrides_reach_their_place() -> None:
    recipe = build.recipe(
        "demo",
        ["optimizer.betas=[0.8, 0.9]", "reward.0.weight=2.5", "model.lora.rank=4", "about=x y"],
    )
    assert recipe.optimizer.betas == (0.8, 0.9)
    assert recipe.reward[0].weight == 2.5
    assert recipe.model.lora is not None and recipe.model.lora.rank == 4
    assert recipe.about == "x y"


def test_the_last_of_two_overrides_wins() -> None:
    recipe = build.recipe("demo", ["optimizer.lr=1e-3", "optimizer.lr=1e-5"])
    assert recipe.optimizer.lr == 1e-5


@pytest.mark.parametrize("key", ["name", "kind"])
def test_a_table_of_another_kind_takes_no_option_of_its_base(key: str) -> None:
    base = {"surrogate": {key: "clip", "low": 0.2}, "lr": 1.0}
    other, same = {"surrogate": {key: "cispo"}}, {"surrogate": {key: "clip", "high": 0.3}}
    assert tables.over(base, other) == {"surrogate": {key: "cispo"}, "lr": 1.0}
    assert tables.over(base, same)["surrogate"] == {key: "clip", "low": 0.2, "high": 0.3}


def test_frozen() -> None:
    recipe = build.recipe("demo")
    with pytest.raises(pydantic.ValidationError):
        recipe.seed = 3  # type: ignore[misc]
    with pytest.raises(pydantic.ValidationError):
        build.algorithm(recipe).group = 3  # type: ignore[misc]


def test_no_such_recipe() -> None:
    with pytest.raises(UserError, match='unknown recipe "demoo"; did you mean "demo'):
        build.recipe("demoo")
    with pytest.raises(UserError, match=r"^recipe mine/geo\.toml: no such file$"):
        build.recipe("mine/geo.toml")


@pytest.mark.parametrize("name", tables.bundled_recipes())
def test_every_bundled_recipe_loads_and_is_short(name: str) -> None:
    recipe = build.recipe(name)
    assert recipe.about
    text = (tables.RECIPES / f"{name}.toml").read_text(encoding="utf-8").partition("\n[card.")[0]
    assert len([line for line in text.splitlines() if line.strip()]) < 50


def test_a_resolved_recipe_says_everything_and_reads_back(tmp_path) -> None:
    from gesso.run import recipe_of
    from gesso.track.run_folder import RunFolder

    for name in tables.bundled_recipes():
        recipe = build.recipe(name, ["learner.ema.every=2"])
        run = RunFolder.create(tmp_path / name, recipe.model_dump())
        assert recipe_of(run) == recipe
        assert "clip" in recipe.algorithm.options or recipe.algorithm.name != "flow-grpo"


def test_user_algorithm_by_module_name() -> None:
    recipe = build.recipe("demo", ["algorithm.name=gesso.algorithms.flow_grpo:FlowGRPO"])
    assert type(build.algorithm(recipe)).__name__ == "FlowGRPO"
    with pytest.raises(UserError, match=r'flow_grpo.* has no "Nothing"'):
        build.recipe("demo", ["algorithm.name=gesso.algorithms.flow_grpo:Nothing"])


def test_a_batch_that_cannot_be_split_into_its_updates() -> None:
    with pytest.raises(UserError, match=r"8 × 12 = 96 samples .* into 5 updates; .* 4 or 6"):
        build.recipe("demo", ["algorithm.updates=5"])


# micro_batch of the demo (288 terms an update) → the sentence
MICRO = [(96, None), (288, None), (1000, None), (100, "the last one has 88; .* = 96 or 144")]


@pytest.mark.parametrize("size, sentence", MICRO)
def test_micro_batches_that_do_not_come_out_even(size: int, sentence: str | None) -> None:
    recipe = build.recipe("demo", [f"learner.micro_batch={size}"])
    notes = families.of(recipe).notes(recipe, build.algorithm(recipe))
    assert notes == [] if sentence is None else re.search(sentence, notes[0])


def test_the_papers_shape_fits() -> None:
    recipe = build.recipe("sd35-ocr")
    assert recipe.data.groups * recipe.algorithm.options["group"] == 48 * 24
    assert families.of(recipe).notes(recipe, build.algorithm(recipe)) == []


def test_a_recipe_over_a_base(tmp_path) -> None:
    (tmp_path / "mine.toml").write_text(
        'base = "demo"\nsteps = 7\nalgorithm.window = "none"\noptimizer.lr = 1e-5\n'
    )
    (tmp_path / "again.toml").write_text('base = "mine.toml"\nalgorithm.name = "mix-grpo"\n')
    mine, again = (build.recipe(str(tmp_path / f"{n}.toml")) for n in ("mine", "again"))
    assert (mine.steps, mine.optimizer.lr, mine.optimizer.weight_decay) == (7, 1e-5, 0.0)
    assert "window" not in mine.algorithm.options and mine.algorithm.options["group"] == 12
    assert again.steps == 7 and again.algorithm.options["steps"] == 25  # another name starts anew
    (tmp_path / "loop.toml").write_text('base = "loop.toml"\n')
    with pytest.raises(UserError, match="has itself as its base"):
        build.recipe(str(tmp_path / "loop.toml"))
    (tmp_path / "lost.toml").write_text('base = "nowhere"\n')
    with pytest.raises(UserError, match='unknown recipe "nowhere"'):
        build.recipe(str(tmp_path / "lost.toml"))


def test_other_rewards_have_other_judges(tmp_path: Path) -> None:
    """In a recipe with a base, and in an override of the whole list."""
    own = tmp_path / "own.toml"
    own.write_text('base = "sd35-ocr"\nabout = "x"\nreward = [{ name = "hps" }]\n', "utf-8")
    for recipe in (build.recipe(str(own)), build.recipe("sd35-ocr", ['reward=[{name="hps"}]'])):
        assert recipe.reward[0].name == "hps" and recipe.eval_reward == []
        assert recipe.expect is None
    watched = build.recipe("sd35-ocr", ['eval_reward=[{name="hps"}]'])
    assert watched.eval_reward[0].name == "hps" and watched.expect is None
    kept = build.recipe("sd35-ocr", ["reward.0.workers=2"])
    assert [entry.name for entry in kept.eval_reward] == ["ocr", "aesthetic"] and kept.expect


def test_a_default_number_can_be_removed() -> None:
    """An option that may be absent is absent after a round trip through config.toml, too."""
    for name, last in (("demo-dgpo", 5), ("demo-awm", 5)):
        assert build.recipe(name).algorithm.options["last"] == last
        recipe = build.recipe(name, ["algorithm.last=none"])
        again = build.recipe_from(recipe.model_dump())
        for each in (recipe, again):
            assert each.algorithm.options["last"] == "none"
            assert getattr(build.algorithm(each), "last") is None  # noqa: B009


@pytest.mark.parametrize(
    "overrides",
    [
        ["on_symptom=stop", "on_symptom.saturated=lower_lr"],
        ["on_symptom.saturated=lower_lr", "on_symptom=stop"],
    ],
)
def test_the_short_form_of_on_symptom_combines_with_others(
    overrides: list[str], tmp_path: Path
) -> None:
    both = {"reward-hacking": "stop", "saturated": "lower_lr"}
    assert build.recipe("demo", overrides).on_symptom == both
    assert build.recipe("demo", [*overrides, "on_symptom=none"]).on_symptom == {}
    short, more = tmp_path / "short.toml", tmp_path / "more.toml"
    short.write_text('base = "demo"\non_symptom = "stop"\n')
    more.write_text(f'base = "{short}"\n[on_symptom]\nsaturated = "lower_lr"\n')
    assert build.recipe(str(more)).on_symptom == both

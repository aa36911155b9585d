"""The large recipes: their settings are the published ones, their sizes change sizes alone.

Published settings are in tests/published.toml. Nothing here reads a default of Gesso: a default
that changes must break a test or be written into the recipe.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gesso import build, families
from gesso.config import PACKAGE, Recipe, tables
from gesso.families import classes

Settings = dict[str, Any]  # by dotted key

PUBLISHED = tables.read_toml(Path(__file__).parent / "published.toml")
LARGE = [name for name in tables.bundled_recipes() if not name.startswith("demo")]
LANGUAGE = [name for name in LARGE if name.startswith("qwen25-")]
IMAGE = [name for name in LARGE if name not in LANGUAGE]
SIZED = [(name, card) for name in LARGE for card in tables.read_recipe(name).cards]
NONE = tables.NOTHING


def flat(table: Mapping[str, Any], above: str = "") -> Settings:
    """Nested tables by dotted keys."""
    settings: Settings = {}
    for key, value in table.items():
        path = f"{above}{key}"
        settings |= flat(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return settings


def published(name: str) -> Settings:
    table = dict(PUBLISHED[name])
    settings: Settings = {}
    for changes in (*map(published, table.pop("parts", [])), flat(table)):
        for key in changes:  # a value replaces a table, and a table a value
            replaced = [k for k in settings if k.startswith(f"{key}.") or key.startswith(f"{k}.")]
            for old in replaced:
                del settings[old]
        settings |= changes
    return settings


def resolved(recipe: Recipe) -> Settings:
    data = recipe.model_dump()
    data["reward"] = {entry.name: entry.weight for entry in recipe.reward}
    data["optimizer"]["betas"] = list(recipe.optimizer.betas)
    return {key: NONE if value is None else value for key, value in flat(data).items()}


def test_parts_are_merged_in_order() -> None:
    settings = published("qwen-image-ocr")
    assert settings["learner.ema"] == NONE and "learner.ema.decay" not in settings
    assert settings["algorithm.advantage.std"] == "global"  # of fast, over any-flow
    assert settings["algorithm.window.size"] == 2 and settings["algorithm.window.high"] == 5


@pytest.mark.parametrize("name", LARGE)
def test_settings_are_the_published_ones(name: str) -> None:
    expected, recipe = published(name), resolved(build.recipe(name))
    expected.pop("batch")
    wrong = {
        key: f"{recipe.get(key, NONE)}, expected {value}"
        for key, value in expected.items()
        if recipe.get(key, NONE) != value
    }
    assert not wrong


@pytest.mark.parametrize("name", LARGE)
def test_every_option_has_a_published_value(name: str) -> None:
    """The default of an option that is not in published.toml could change unnoticed."""
    recipe = resolved(build.recipe(name))
    keys = {key for key in recipe if key.startswith(("algorithm.", "optimizer."))}
    unused = {"algorithm.timestep_fraction"} if "algorithm.window.size" in recipe else set()
    assert keys - unused <= set(published(name))


@pytest.mark.parametrize("name", IMAGE)
def test_a_held_out_judge_watches_image_models(name: str) -> None:
    """It runs without a server, and it is not trained."""
    recipe = build.recipe(name)
    trained = {entry.name for entry in recipe.reward}
    judges = [entry for entry in recipe.eval_reward if entry.name not in trained]
    assert trained <= {entry.name for entry in recipe.eval_reward}
    assert judges and all(entry.weight == 0 and entry.remote is None for entry in judges)


@pytest.mark.parametrize("name", IMAGE)
def test_effective_batches_are_the_published_ones(name: str) -> None:
    recipe = build.recipe(name)
    chosen = build.algorithm(recipe)
    samples, trained = published(name)["batch"]
    assert trained_steps(recipe) == trained
    assert recipe.data.groups * chosen.group == samples * chosen.updates


@pytest.mark.parametrize("name, card", [*((name, None) for name in LARGE), *SIZED])
def test_batches_split_evenly(name: str, card: str | None) -> None:
    """Into updates; for image models into micro-batches and sampling batches, too."""
    recipe = build.recipe(name, card=card)
    chosen = build.algorithm(recipe)
    samples, remainder = divmod(recipe.data.groups * chosen.group, chosen.updates)
    assert remainder == 0
    if name in IMAGE:
        assert samples * trained_steps(recipe) % recipe.learner.micro_batch == 0
        assert samples * chosen.updates % recipe.sampler.batch == 0
        # Rounding depends on the batch shape: with equal shapes the ratio starts closest to 1.
        assert recipe.sampler.batch == recipe.learner.micro_batch


def trained_steps(recipe: Recipe) -> int:
    return build.algorithm(recipe).terms_a_sample


@pytest.mark.parametrize("name", LANGUAGE)
def test_updates_have_the_published_number_of_responses(name: str) -> None:
    recipe = build.recipe(name)
    chosen = build.algorithm(recipe)
    (responses,) = published(name)["batch"]
    assert recipe.data.groups * chosen.group == responses * chosen.updates


def test_dapos_penalty_starts_a_quarter_before_the_limit() -> None:
    recipe = build.recipe("qwen25-math-7b-dapo")
    (penalty,) = (entry.options for entry in recipe.reward if entry.name == "overlong")
    assert penalty["limit"] == 4 * penalty["buffer"] == recipe.algorithm.options["max_tokens"]


@pytest.mark.parametrize("name", [n for n in LANGUAGE if n != "qwen25-math-7b-dapo"])
def test_templates_request_the_format_that_is_rewarded(name: str) -> None:
    template = build.recipe(name).data.template or ""
    assert "{{ content }}" in template
    assert all(tag in template for tag in ("<think>", "</think>", "<answer>", "</answer>"))


@pytest.mark.parametrize("name", LARGE)
def test_large_recipes_are_short_and_name_their_source(name: str) -> None:
    recipe = build.recipe(name)
    assert recipe.about.endswith(".") and recipe.source.startswith("arXiv 2")
    assert "github" in recipe.source
    assert recipe.model.name in classes.REFERENCES
    text, *cards = re.split(
        r"(?m)^(?=\[card\.)", (tables.RECIPES / f"{name}.toml").read_text(encoding="utf-8")
    )
    assert count_lines(text) < 30 and all(count_lines(card) <= 12 for card in cards)
    assert len(cards) == len(re.findall(r"(?m)^\[card\.[\dx]+\]", "".join(cards)))  # no subtables
    assert "\nsource = " in text, "a recipe names its own source, not that of its base"
    page = PACKAGE.parent / "docs/explanation/published-settings.md"
    assert f"`{name}`" in page.read_text(encoding="utf-8")


def count_lines(text: str) -> int:
    return len([line for line in text.splitlines() if line.strip()])


SIZES = {
    "about", "data.groups", "learner.micro_batch", "sampler.batch", "model.gradient_checkpointing",
    "model.quantize", "model.lora.rank", "model.lora.alpha", "model.fold", "model.text_length",
    "model.vae_tiling", "cluster.workers", "cluster.sharding", "cluster.offload",
}  # fmt: skip
LORA = {"model.lora", "model.lora.path", "model.lora.targets", "model.train_vision", "optimizer.lr"}


@pytest.mark.parametrize("name, card", SIZED)
def test_a_card_changes_sizes_and_nothing_else(name: str, card: str) -> None:
    recipe = build.recipe(name, card=card)
    own, base = resolved(recipe), resolved(build.recipe(name))
    changed = {key for key in own.keys() | base.keys() if own.get(key) != base.get(key)}
    starts_lora = "model.lora" in base  # which is "none" there
    assert changed <= (SIZES | LORA if starts_lora else SIZES)
    assert own["data.groups"] <= base["data.groups"]
    assert (
        recipe.about.startswith(base["about"])
        and f" {card.replace('x', ' × ')} GB: " in recipe.about
    )
    assert families.of(recipe).notes(recipe, build.algorithm(recipe)) == []

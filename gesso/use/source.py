"""What can be sampled from: a run, a recipe or a model folder. Resolved here, before anything heavy
is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gesso import build
from gesso.config import ZOO, AnyRecipe, Recipe, compatibility, tables
from gesso.config.parsing import parse
from gesso.track.run_folder import RunFolder
from gesso.types import UserError
from gesso.use import folders

Table = Literal["ema", "current"]
"""Averaged or current weights of a checkpoint."""


@dataclass(frozen=True)
class ModelSource:
    name: str  # in tables and file names: "runs/demo-001 step 40"
    recipe: AnyRecipe  # how to load it and sample from it
    untrained: AnyRecipe | None = None  # of the base model; None: unknown
    run: RunFolder | None = None
    step: int = 0
    table: Table = "current"

    @property
    def training(self) -> Recipe | None:
        """The recipe with its data and rewards; None for a folder not written by Gesso."""
        return self.recipe if isinstance(self.recipe, Recipe) else None

    @property
    def label(self) -> str:
        """The name in file names."""
        if self.run is None:
            kind, path = (
                ("base-", self.name[5:]) if self.name.startswith("base ") else ("", self.name)
            )
            return kind + re.sub(r"[^\w.]+", "-", Path(path).name).strip("-")
        kept = self.recipe.learner.ema is not None and self.table == "current"
        name = f"{self.run.path.resolve().name}-step{self.step}"
        return f"{name}-current" if kept else name

    def announce_code(self, *kinds: str) -> None:
        """For a run or an export, which may come from someone else; not for the user's recipe."""
        if self.run is not None or self.untrained is not None:
            build.announce_code(self.recipe, self.name, *kinds)

    @property
    def base(self) -> ModelSource:
        """The base model: the weights of a run before any update."""
        if self.untrained is None:
            raise UserError(f"the base model of {self.name} is unknown; remove --base")
        return ModelSource(f"base {self.untrained.model.path}", self.untrained)


def find(
    what: str | Path,
    step: int | None = None,
    table: str | None = None,
    overrides: Sequence[str] = (),
) -> ModelSource:
    """`step` and `table` select a checkpoint of a run and its weights; by default the newest one,
    with averaged weights if it has any. `overrides` change its recipe."""
    path = Path(os.path.expanduser(what))
    if os.path.isfile(path / "config.toml"):
        return _of_run(RunFolder.open(path), step, table, overrides)
    if step is not None or table is not None:
        raise UserError(
            f"--step and --weights select a checkpoint of a run, but {what} is not a run; remove "
            "them"
        )
    if os.path.isdir(path):  # never raises, as Path.is_dir may
        folder = folders.recipe_of(path, overrides)
        return ModelSource(str(what), folder.recipe, folder.untrained)
    if _looks_like_a_folder(str(what)):
        raise UserError(
            f"{what}: no such folder; expected a run, a recipe, or a model folder of diffusers or "
            "transformers (download models of the Hub first)"
        )
    try:
        return ModelSource(str(what), build.recipe(str(what), overrides))
    except tables.UnknownRecipe as error:
        if str(what).startswith(ZOO):
            raise UserError(
                f"{what} is a value of model.path; expected a run, a recipe{_with_path(what)}, or "
                "a model folder"
            ) from error
        raise UserError(f"{what} is neither a run nor a model folder; {error}") from error


def _with_path(path: object) -> str:
    """An example of a recipe of a bundled model."""
    for name in tables.bundled_recipes():
        if tables.read_toml(tables.RECIPES / f"{name}.toml").get("model", {}).get("path") == path:
            return f" such as {name}"
    return ""


def recipe_of(run: RunFolder, overrides: Sequence[str] = ()) -> Recipe:
    """The resolved recipe of a run. The packages of its rewards need not be installed."""
    path = run.path / "config.toml"
    recipe = parse(Recipe, tables.changed(tables.read_toml(path), overrides), str(path))
    compatibility.check_cluster(recipe, str(path))
    return recipe


def _of_run(
    run: RunFolder, step: int | None, table: str | None, overrides: Sequence[str]
) -> ModelSource:
    recipe = recipe_of(run, overrides)
    steps = run.steps
    if not steps:
        raise UserError(f"{run.path} has no checkpoint yet; train it further, or use its recipe")
    if step is not None and step not in steps:
        raise UserError(
            f"{run.path} has no checkpoint of step {step}; expected one of "
            f"{', '.join(map(str, steps))}"
        )
    chosen = steps[-1] if step is None else step
    source = ModelSource(f"{run.path} step {chosen}", recipe, recipe, run=run, step=chosen)
    return replace(source, table=_table(run, recipe, table))


def _table(run: RunFolder, recipe: Recipe, requested: str | None) -> Table:
    if requested not in (None, "ema", "current"):
        raise UserError(f'expected weights "ema" or "current", got "{requested}"')
    if requested == "ema" and recipe.learner.ema is None:
        raise UserError(
            f"{run.path} has no averaged weights (its recipe has no learner.ema); remove --weights "
            "to use the current weights"
        )
    return "ema" if requested != "current" and recipe.learner.ema is not None else "current"


def _looks_like_a_folder(what: str) -> bool:
    return "/" in what and not what.endswith(".toml")

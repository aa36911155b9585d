"""Names in a recipe → objects: algorithms and trackers by the tables here, models by
`config/bundled.py`, rewards by `rewards/assembly.py`; user code as "module:Name"."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from gesso import families, imports
from gesso.config import FAMILIES, AnyRecipe, ModelRecipe, Recipe, Strict, compatibility
from gesso.config.parsing import named, nearest, parse
from gesso.config.tables import NOTHING, changed, over, read_recipe, without_nothing
from gesso.rewards.assembly import resolved
from gesso.track.trackers.process import Tracked
from gesso.types import UserError

if TYPE_CHECKING:
    from gesso.algorithms.base import Algorithm
    from gesso.models.tokens.critic import Critic
    from gesso.samplers.base import Sampler

ALGORITHMS = {
    "flow-grpo": "gesso.algorithms.flow_grpo:FlowGRPO",
    "flow-grpo-fast": "gesso.algorithms.flow_grpo_fast:FlowGRPOFast",
    "mix-grpo": "gesso.algorithms.mix_grpo:MixGRPO",
    "dance-grpo": "gesso.algorithms.dance_grpo:DanceGRPO",
    "grpo-guard": "gesso.algorithms.grpo_guard:GRPOGuard",
    "flow-dppo": "gesso.algorithms.flow_dppo:FlowDPPO",
    "diffusion-nft": "gesso.algorithms.diffusion_nft:DiffusionNFT",
    "grpo": "gesso.algorithms.grpo:GRPO",
    "dr-grpo": "gesso.algorithms.grpo:DrGRPO",
    "dapo": "gesso.algorithms.grpo:DAPO",
    "gspo": "gesso.algorithms.grpo:GSPO",
    "cispo": "gesso.algorithms.grpo:CISPO",
    "rloo": "gesso.algorithms.reinforce:RLOO",
    "rloo-tokens": "gesso.algorithms.reinforce:RLOOTokens",
    "reinforce++": "gesso.algorithms.reinforce:ReinforcePP",
    "reinforce++-baseline": "gesso.algorithms.reinforce:ReinforcePPBaseline",
    "remax": "gesso.algorithms.reinforce:ReMax",
    "ppo": "gesso.algorithms.ppo:PPO",
}
TRACKERS = {
    "tensorboard": "gesso.track.trackers.tensorboard:TensorBoard",
    "wandb": "gesso.track.trackers.wandb:Wandb",
    "swanlab": "gesso.track.trackers.swanlab:SwanLab",
    "mlflow": "gesso.track.trackers.mlflow:MLflow",
}
SHOWN = ("console", "jsonl")  # what `track` may name beside them; metrics.jsonl is always written


def recipe(source: str, overrides: Sequence[str] = (), card: int | None = None) -> Recipe:
    """A bundled recipe's name or a TOML file, its size for a GPU of `card` GB, and `key=value`
    overrides by dotted keys."""
    data = changed(read_recipe(source).for_card(card), overrides)
    if "card" in data:
        raise UserError(
            'overrides cannot set "card"; choose one of the recipe\'s sizes by --card, and change '
            "its keys themselves, as in data.groups=8"
        )
    size = "" if card is None else f" with card.{card}"
    return recipe_from(data, f"recipe {Path(source).stem}{size}")


def recipe_from(data: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """The recipe with every option of its algorithm and rewards filled in and checked."""
    recipe = parse(Recipe, families.with_family(data, where), where)
    _check_family(recipe, where)
    _check_track(recipe.track, where)
    options = algorithm(recipe)
    family = families.of(recipe)
    compatibility.check_device(recipe, where)
    family.check_model(recipe, where)
    compatibility.check_sizes(recipe, options, where)
    family.check(recipe, options, where)
    filled = recipe.model_dump() | {
        "eval": family.eval_section(recipe, options).model_dump(),
        "algorithm": _filled(options),
        "reward": [resolved(entry) for entry in recipe.reward],
        "eval_reward": [resolved(entry) for entry in recipe.eval_reward],
    }
    return parse(Recipe, filled, where)


def model_recipe_from(data: Mapping[str, Any], where: str) -> ModelRecipe:
    """The same for a recipe without training."""
    recipe = parse(ModelRecipe, families.with_family(data, where), where)
    _check_family(recipe, where)
    options = algorithm(recipe)
    family = families.of(recipe)
    compatibility.check_device(recipe, where)
    family.check_model(recipe, where)
    filled = recipe.model_dump() | {
        "eval": family.eval_section(recipe, options).model_dump(),
        "algorithm": _filled(options),
    }
    return parse(ModelRecipe, filled, where)


def _check_family(recipe: AnyRecipe, where: str) -> None:
    """Raises for an algorithm of the other family."""
    family = families.of(recipe)
    other = algorithm_class(recipe.algorithm.name).family
    if other != family.name:
        fit = [name for name in ALGORITHMS if algorithm_class(name).family == family.name]
        raise UserError(
            f'{where}: algorithm "{recipe.algorithm.name}" is for models that '
            f"{families.BY_NAME[other].verb}, and model.name = "
            f'"{recipe.model.name}" {family.name}; use one of {", ".join(fit)}'
        )


def _check_track(names: Sequence[str], where: str) -> None:
    known = [*SHOWN, *TRACKERS]
    for name in names:
        if ":" not in name and name not in known:
            raise UserError(f'{where}: no tracker "{name}"{nearest(name, known)}')
        if names.count(name) > 1:
            raise UserError(f'{where}: track has "{name}" twice; once is enough')


def algorithm(recipe: AnyRecipe) -> Algorithm:
    """A section of the recipe's options changes the keys that it names, and keeps the others of the
    algorithm's own default: to set one key of `advantage` does not reset the rest. "none" removes
    a key."""
    entry = recipe.algorithm
    kind = algorithm_class(entry.name)
    default = {"name": entry.name} | _sections(kind)
    options = over(default, {"name": entry.name, **entry.options})
    return parse(kind, without_nothing(options), f"algorithm {entry.name}")


def _sections(kind: type[BaseModel]) -> dict[str, Any]:
    """The sections of an algorithm, by default."""
    return {
        name: field.default.model_dump(exclude_none=True)
        for name, field in kind.model_fields.items()
        if isinstance(field.default, BaseModel)
    }


def _filled(algorithm: Any) -> dict[str, Any]:
    """All options of an algorithm, to build the same one again: a key that a section has by default
    and this one has not is "none"."""
    options: dict[str, Any] = algorithm.model_dump(exclude_none=True)
    for name, default in _sections(type(algorithm)).items():
        section = options.get(name)
        if section is not None and section.get("kind") == default.get("kind"):
            options[name] = section | {key: NOTHING for key in default if key not in section}
    return options


def algorithm_class(name: str) -> type[Any]:
    kind = imports.load(named(ALGORITHMS, name, "algorithm"), "algorithm")
    if imports.is_user_code(name):
        from gesso.algorithms.base import Algorithm

        imports.check_class(kind, Algorithm, f'algorithm "{name}"')
        if not issubclass(kind, Strict) or imports.attribute(kind, "family") not in FAMILIES:
            raise UserError(
                f'algorithm "{name}" must derive from gesso.config.Strict and have a family, one '
                f"of {', '.join(FAMILIES)}"
            )
        if "generator" in inspect.signature(kind.terms).parameters:
            raise UserError(
                f'algorithm "{name}": expected terms(rollout, prepared), got one with a generator, '
                "as before Gesso drew from the seeds of rollout.samples alone; leave it out"
            )
    return kind


def model(recipe: AnyRecipe) -> Any:
    return families.of(recipe).model(recipe)


def add_critic(recipe: Recipe, algorithm: Algorithm, model: Any) -> tuple[Algorithm, Critic | None]:
    """The algorithm with the critic that it asks for, and that critic."""
    return families.of(recipe).add_critic(recipe, algorithm, model)


def check_trackers(recipe: Recipe) -> None:
    """Raises where a tracker's package is not installed."""
    for name in recipe.track:
        if name in TRACKERS and not imports.is_installed(name):
            raise UserError(
                f'track has "{name}", whose package is not here: pip install "gesso[{name}]"'
            )
        if imports.is_user_code(name):
            _check_tracker(name)


def _check_tracker(name: str) -> None:
    from gesso.track.trackers.base import Batched, Tracker

    kind = imports.load(name, "tracker")
    batched = isinstance(kind, type) and imports.attribute(kind, "log_rows") is not None
    imports.check_class(kind, Batched if batched else Tracker, f'tracker "{name}"')


def trackers(recipe: Recipe, run: Path, tell: Callable[[str], None]) -> list[Tracked]:
    """The services of `track`; they start when the run does."""
    names = [name for name in recipe.track if name not in SHOWN]
    config = recipe.model_dump()
    return [
        Tracked(name, TRACKERS.get(name, name), run, config, recipe.tracker, tell) for name in names
    ]


def sampler(recipe: Recipe, algorithm: Algorithm, model: Any) -> Sampler:
    """The engine of the recipe, which samples in a run."""
    return families.of(recipe).sampler(recipe, algorithm, model)


def built_in_sampler(recipe: AnyRecipe, model: Any) -> Sampler:
    """Gesso's own loop over the model, which needs no other engine."""
    return families.of(recipe).built_in_sampler(recipe, model)


def user_code(recipe: AnyRecipe) -> list[tuple[str, str]]:
    """Code outside Gesso that a recipe names: ("reward", "my_reward:redness"). Imports nothing."""
    names = [("model", recipe.model.name), ("algorithm", recipe.algorithm.name)]
    if isinstance(recipe, Recipe):
        entries = (*recipe.reward, *recipe.eval_reward)
        names += [("reward", entry.name) for entry in entries if entry.remote is None]
        names += [("tracker", name) for name in recipe.track]
    return list(dict.fromkeys((what, name) for what, name in names if imports.is_user_code(name)))


def announce_code(recipe: AnyRecipe, place: str | Path, *kinds: str) -> None:
    """Called before code of these kinds is imported, for a recipe that may be somebody else's. It
    goes to stderr whatever the display: neither a foreign file nor --quiet can switch it off."""
    code = ", ".join(f'{what} "{name}"' for what, name in user_code(recipe) if what in kinds)
    if code:
        print(f"{place} runs code that is not part of Gesso: {code}", file=sys.stderr)

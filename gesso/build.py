"""Names in a recipe → objects. Algorithms and trackers are listed here, models in
`config/bundled.py`, rewards in `rewards/assembly.py`; user code is named "module:Name"."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from gesso import consistency, families, imports
from gesso.config import FAMILIES, AnyRecipe, Model, ModelRecipe, Recipe, Strict, compatibility
from gesso.config.parsing import named, nearest, parse
from gesso.config.tables import (
    NOTHING,
    changed,
    over,
    read_recipe,
    without_judges,
    without_nothing,
)
from gesso.data.given import GivenColumns
from gesso.families import classes
from gesso.rewards.assembly import resolved
from gesso.track.trackers.process import Tracked
from gesso.types import UserError

if TYPE_CHECKING:
    from gesso.algorithms.base import Algorithm
    from gesso.learner.learner import Learner
    from gesso.models.tokens.critic import Critic
    from gesso.ranks import Group
    from gesso.samplers.base import Sampler
    from gesso.track.progress import Progress

ALGORITHMS = {
    "flow-grpo": "gesso.algorithms.flow_grpo:FlowGRPO",
    "flow-grpo-fast": "gesso.algorithms.flow_grpo_fast:FlowGRPOFast",
    "mix-grpo": "gesso.algorithms.mix_grpo:MixGRPO",
    "dance-grpo": "gesso.algorithms.dance_grpo:DanceGRPO",
    "grpo-guard": "gesso.algorithms.grpo_guard:GRPOGuard",
    "flow-dppo": "gesso.algorithms.flow_dppo:FlowDPPO",
    "diffusion-nft": "gesso.algorithms.diffusion_nft:DiffusionNFT",
    "flash-grpo": "gesso.algorithms.flash_grpo:FlashGRPO",
    "tempflow-grpo": "gesso.algorithms.tempflow_grpo:TempFlowGRPO",
    "awm": "gesso.algorithms.awm:AWM",
    "dgpo": "gesso.algorithms.preference:DGPO",
    "flow-dpo": "gesso.algorithms.preference:FlowDPO",
    "flow-opd": "gesso.algorithms.flow_opd:FlowOPD",
    "flow-rft": "gesso.algorithms.flow_rft:FlowRFT",
    "flow-sft": "gesso.algorithms.flow_sft:FlowSFT",
    "draft": "gesso.algorithms.draft:DRaFT",
    "refl": "gesso.algorithms.refl:ReFL",
    "leap-align": "gesso.algorithms.leap_align:LeapAlign",
    "grpo": "gesso.algorithms.grpo:GRPO",
    "dr-grpo": "gesso.algorithms.grpo:DrGRPO",
    "dapo": "gesso.algorithms.grpo:DAPO",
    "gspo": "gesso.algorithms.grpo:GSPO",
    "cispo": "gesso.algorithms.grpo:CISPO",
    "sapo": "gesso.algorithms.sapo:SAPO",
    "rloo": "gesso.algorithms.reinforce:RLOO",
    "rloo-tokens": "gesso.algorithms.reinforce:RLOOTokens",
    "reinforce++": "gesso.algorithms.reinforce:ReinforcePP",
    "reinforce++-baseline": "gesso.algorithms.reinforce:ReinforcePPBaseline",
    "remax": "gesso.algorithms.reinforce:ReMax",
    "opd": "gesso.algorithms.opd:OPD",
    "ppo": "gesso.algorithms.ppo:PPO",
    "dpo": "gesso.algorithms.dpo:DPO",
    "sft": "gesso.algorithms.sft:SFT",
}
TRACKERS = {
    "tensorboard": "gesso.track.trackers.tensorboard:TensorBoard",
    "wandb": "gesso.track.trackers.wandb:Wandb",
    "swanlab": "gesso.track.trackers.swanlab:SwanLab",
    "mlflow": "gesso.track.trackers.mlflow:MLflow",
}
SHOWN = ("console", "jsonl")  # also allowed in `track`; metrics.jsonl is always written


def recipe(source: str, overrides: Sequence[str] = (), card: int | str | None = None) -> Recipe:
    """A bundled recipe's name or a TOML file, its size for a GPU of `card` GB (24, or "8x24" for
    8 GPUs), and `key=value` overrides by dotted keys."""
    keys = [override.partition("=")[0].strip() for override in overrides]
    data = changed(without_judges(read_recipe(source).for_card(card), keys), overrides)
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
    compatibility.check_cluster(recipe, where)
    family.check(recipe, options, where)
    _check_given(recipe, options, where)
    consistency.check(recipe, options, where)
    filled = recipe.model_dump() | {
        "eval": family.eval_section(recipe, options).model_dump(),
        "algorithm": _filled(recipe, options),
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
        "algorithm": _filled(recipe, options),
    }
    return parse(ModelRecipe, filled, where)


def _check_family(recipe: AnyRecipe, where: str) -> None:
    """Raises for an algorithm of the other family."""
    family = families.of(recipe)
    other = algorithm_class(recipe.algorithm.name).family
    if other != family.name:
        fit = [name for name in ALGORITHMS if algorithm_class(name).family == family.name]
        raise UserError(
            f'{where}: algorithm "{recipe.algorithm.name}" is for {other} models, but model.name = '
            f'"{recipe.model.name}" is a {family.name} model; use one of {", ".join(fit)}'
        )


def _check_track(names: Sequence[str], where: str) -> None:
    known = [*SHOWN, *TRACKERS]
    for name in names:
        if ":" not in name and name not in known:
            raise UserError(f'{where}: unknown tracker "{name}"{nearest(name, known)}')
        if names.count(name) > 1:
            raise UserError(f'{where}: track lists "{name}" more than once; remove the duplicate')


def _check_given(recipe: Recipe, algorithm: Algorithm, where: str) -> None:
    """Whether the algorithm can train on the samples that the engine returns."""
    name, given = recipe.algorithm.name, algorithm.given
    if recipe.sampler.engine != "data":
        if given and not algorithm.advantage.compares:
            raise UserError(
                f'{where}: algorithm "{name}" trains on samples of the data, column "{given[0]}"; '
                'set sampler.engine = "data"'
            )
        return
    if not given:
        kinds = {n: algorithm_class(n) for n in ALGORITHMS}
        fit = [n for n, k in kinds.items() if k.given and k.family == algorithm.family]
        raise UserError(
            f'{where}: sampler.engine = "data" takes samples from the data, but algorithm "{name}" '
            f"trains on its own; use one of {', '.join(fit)}, or remove sampler.engine"
        )
    if algorithm.group != len(given):
        raise UserError(
            f'{where}: sampler.engine = "data": a row gives {len(given)} samples '
            f"({' and '.join(given)}), got algorithm.group = {algorithm.group}; set it to "
            f"{len(given)}"
        )
    from gesso.algorithms.advantage import Advantage
    from gesso.algorithms.flow import FlowAlgorithm

    advantage = algorithm.advantage
    wrong = {
        'algorithm.advantage.combine = "gdpo"': isinstance(advantage, Advantage)
        and advantage.combine == "gdpo",
        "algorithm.gate": isinstance(algorithm, FlowAlgorithm) and algorithm.gate is not None,
        "data.curriculum": recipe.data.curriculum is not None,
    }
    for key, applies in wrong.items():
        if applies:
            raise UserError(
                f'{where}: {key} uses the rewards of training samples, but sampler.engine = "data" '
                "has none; remove it"
            )


def given(recipe: AnyRecipe) -> GivenColumns | None:
    """The columns of the samples that rows give; None if training samples are generated."""
    if recipe.sampler.engine != "data":
        return None
    names: Sequence[str] = algorithm_class(recipe.algorithm.name).given
    section = recipe.model
    if not isinstance(section, Model):
        return GivenColumns(names, section.output)
    with_input = classes.needs_images(families.of(recipe), section.name)
    if section.frames == 1:
        names = ["target_image" if with_input and name == "image" else name for name in names]
        return GivenColumns(names, section.output)
    names = ["video" if name == "image" else name for name in names]
    return GivenColumns(names, "video", True, section.frames, section.fps, with_input)


def algorithm(recipe: AnyRecipe) -> Algorithm:
    """The algorithm with the options of the recipe. A subsection such as `advantage` changes only
    the keys that it sets; the others keep the algorithm's defaults. "none" removes a key."""
    entry = recipe.algorithm
    kind = algorithm_class(entry.name)
    default = {"name": entry.name} | _defaults(recipe, kind)
    options = over(default, {"name": entry.name, **entry.options})
    removed = {
        name: None for name, value in options.items() if value == NOTHING and _removable(kind, name)
    }
    return parse(kind, without_nothing(options) | removed, f"algorithm {entry.name}")


def _removable(kind: type[BaseModel], name: str) -> bool:
    """Whether an algorithm can do without this option. Otherwise "none" leaves its default value,
    which for a subsection would be misunderstood."""
    field = kind.model_fields.get(name)
    if field is None or type(None) in typing.get_args(field.annotation):
        return True  # parsing reports an unknown option
    if isinstance(field.default, BaseModel):
        raise UserError(
            f'algorithm {kind.model_fields["name"].default}: "{name}" cannot be removed; change '
            f"its keys, as in algorithm.{name}.{next(iter(type(field.default).model_fields))}"
        )
    return False


def _defaults(recipe: AnyRecipe, kind: type[BaseModel]) -> dict[str, Any]:
    """The default subsections of an algorithm, including those that depend on the recipe."""
    sections = {
        name: field.default
        for name, field in kind.model_fields.items()
        if isinstance(field.default, BaseModel)
    }
    sections |= families.of(recipe).algorithm_defaults(recipe, kind)
    return {name: section.model_dump(exclude_none=True) for name, section in sections.items()}


def _filled(recipe: AnyRecipe, algorithm: Any) -> dict[str, Any]:
    """All options of an algorithm, from which the same one can be built again: a default key or
    subsection that was removed is "none"."""
    options: dict[str, Any] = algorithm.model_dump(exclude_none=True)
    for name, field in type(algorithm).model_fields.items():
        if field.default is not None and getattr(algorithm, name) is None:
            options[name] = NOTHING
    for name, default in _defaults(recipe, type(algorithm)).items():
        section = options.setdefault(name, NOTHING)
        if section != NOTHING and section.get("kind") == default.get("kind"):
            options[name] = section | {key: NOTHING for key in default if key not in section}
    return options


def algorithm_class(name: str) -> type[Any]:
    kind = imports.load(named(ALGORITHMS, name, "algorithm"), "algorithm")
    if imports.is_user_code(name):
        from gesso.algorithms.base import Algorithm

        imports.check_class(kind, Algorithm, f'algorithm "{name}"')
        if not issubclass(kind, Strict) or imports.attribute(kind, "family") not in FAMILIES:
            raise UserError(
                f'algorithm "{name}" must derive from gesso.config.Strict and have an attribute '
                f"family, one of {', '.join(FAMILIES)}"
            )
        if "generator" in inspect.signature(kind.terms).parameters:
            raise UserError(
                f'algorithm "{name}": expected terms(rollout, prepared), got a parameter '
                "`generator`, which earlier versions of Gesso passed; remove it and use the seeds "
                "of rollout.samples"
            )
    return kind


def model(recipe: AnyRecipe) -> Any:
    return families.of(recipe).model(recipe)


def add_critic(recipe: Recipe, algorithm: Algorithm, model: Any) -> tuple[Algorithm, Critic | None]:
    """The algorithm with its critic, and the critic; None for an algorithm without one."""
    return families.of(recipe).add_critic(recipe, algorithm, model)


def learner(
    recipe: Recipe, algorithm: Algorithm, model: Any, progress: Progress, ranks: Group | None = None
) -> tuple[Algorithm, Learner]:
    """The learner, and the algorithm with its critic if it has one."""
    from gesso.learner.learner import Learner
    from gesso.ranks import ALONE
    from gesso.weights.layout import Layout

    algorithm, critic = add_critic(recipe, algorithm, model)
    if ranks is not None and ranks.in_step:
        layout = Layout.of(recipe.cluster, ranks.count)
        model.policy.shard(model.sharding, model.device, layout)
    return algorithm, Learner(
        model,
        algorithm,
        recipe.optimizer,
        recipe.learner,
        recipe.seed,
        critic,
        progress,
        ranks or ALONE,
    )


def check_trackers(recipe: Recipe) -> None:
    """Raises if the package of a tracker is not installed."""
    for name in recipe.track:
        if name in TRACKERS and not imports.is_installed(name):
            raise UserError(
                f'track lists "{name}", but its package is not installed: pip install '
                f'"gesso[{name}]"'
            )
        if imports.is_user_code(name):
            _check_tracker(name)


def _check_tracker(name: str) -> None:
    from gesso.track.trackers.base import Batched, Tracker

    kind = imports.load(name, "tracker")
    batched = isinstance(kind, type) and imports.attribute(kind, "log_rows") is not None
    imports.check_class(kind, Batched if batched else Tracker, f'tracker "{name}"')


def trackers(recipe: Recipe, run: Path, notify: Callable[[str], None]) -> list[Tracked]:
    """The trackers of `track`; they start together with the run."""
    names = [name for name in recipe.track if name not in SHOWN]
    config = recipe.model_dump()
    return [
        Tracked(name, TRACKERS.get(name, name), run, config, recipe.tracker, notify)
        for name in names
    ]


def sampler(recipe: Recipe, algorithm: Algorithm, model: Any) -> Sampler:
    """The sampler for training: the engine that the recipe selects."""
    return families.of(recipe).sampler(recipe, algorithm, model)


def built_in_sampler(recipe: AnyRecipe, model: Any) -> Sampler:
    """Gesso's sampling loop over the model, without an external engine."""
    return families.of(recipe).built_in_sampler(recipe, model)


def user_code(recipe: AnyRecipe) -> list[tuple[str, str]]:
    """Code outside Gesso that a recipe refers to: ("reward", "my_reward:redness"). Imports
    nothing."""
    names = [("model", recipe.model.name), ("algorithm", recipe.algorithm.name)]
    if isinstance(recipe, Recipe):
        entries = (*recipe.reward, *recipe.eval_reward)
        names += [("reward", entry.name) for entry in entries if entry.remote is None]
        names += [("tracker", name) for name in recipe.track]
    return list(dict.fromkeys((what, name) for what, name in names if imports.is_user_code(name)))


def announce_code(recipe: AnyRecipe, place: str | Path, *kinds: str) -> None:
    """Lists code of these kinds on stderr before it is imported, for recipes that may come from
    someone else. Always printed: neither the recipe nor --quiet can disable it."""
    code = ", ".join(f'{what} "{name}"' for what, name in user_code(recipe) if what in kinds)
    if code:
        print(f"{place} runs code that is not part of Gesso: {code}", file=sys.stderr)

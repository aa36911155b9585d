"""Names in a recipe → objects. The only tables of names, but for the rewards' in
rewards/assembly.py; user code comes in as "module:Name"."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from gesso import imports
from gesso.config import FAMILIES, Model, Recipe, Strict, family
from gesso.config import TokenModel as TokenModelSection
from gesso.config import compatibility as agreement
from gesso.config.parsing import named, nearest, parse
from gesso.config.tables import NOTHING, changed, over, read_recipe, without_nothing
from gesso.rewards.assembly import REWARDS as REWARDS
from gesso.rewards.assembly import PromptCheck as PromptCheck
from gesso.rewards.assembly import Rewards as Rewards
from gesso.rewards.assembly import resolved
from gesso.rewards.assembly import reward_entry as reward_entry
from gesso.rewards.assembly import rewards as rewards
from gesso.rewards.assembly import scorer as scorer
from gesso.rewards.assembly import served as served
from gesso.track.trackers.process import Tracked
from gesso.types import UserError

if TYPE_CHECKING:
    from gesso.algorithms.base import Algorithm
    from gesso.models.flow.base import FlowModel
    from gesso.models.tokens.base import TokenModel
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
MODELS = {
    "sd3": "gesso.models.flow.sd3:SD3",
    "flux": "gesso.models.flow.flux:Flux",
    "qwen-image": "gesso.models.flow.qwen_image:QwenImage",
    "vision-language": "gesso.models.tokens.vision_language:VisionLanguage",
    "causal": "gesso.models.tokens.causal:Causal",
}
TRACKERS = {
    "tensorboard": "gesso.track.trackers.tensorboard:TensorBoard",
    "wandb": "gesso.track.trackers.wandb:Wandb",
    "swanlab": "gesso.track.trackers.swanlab:SwanLab",
    "mlflow": "gesso.track.trackers.mlflow:MLflow",
}
SHOWN = ("console", "jsonl")  # what `track` may name beside them; metrics.jsonl is always written


def recipe(source: str, overrides: Sequence[str] = ()) -> Recipe:
    """A bundled recipe's name or a TOML file, with `key=value` overrides by dotted keys."""
    data = changed(read_recipe(source, ()), overrides)
    return recipe_from(data, f"recipe {Path(source).stem}")


def recipe_from(data: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """The recipe with every option of its algorithm and rewards filled in and checked."""
    _check_model(data)
    found = parse(Recipe, data, where)
    _check_family(found, where)
    _check_track(found.track, where)
    chosen = algorithm(found)
    agreement.check(found, chosen, where)
    watched = found.eval
    if isinstance(found.model, Model) and watched.guidance is None:
        spec = chosen.spec(0, 0, found.model)
        watched = watched.model_copy(update={"guidance": spec.guidance})  # type: ignore[union-attr]
    filled = found.model_dump() | {
        "eval": watched.model_dump(),
        "algorithm": _said(chosen),
        "reward": [resolved(entry) for entry in found.reward],
        "eval_reward": [resolved(entry) for entry in found.eval_reward],
    }
    return parse(Recipe, filled, where)


def _check_model(data: Mapping[str, Any]) -> None:
    """Its name decides which keys it has: a typo in it must not be told as one in those."""
    section = data.get("model")
    name = section.get("name") if isinstance(section, Mapping) else None
    if isinstance(name, str):
        named(MODELS, name, "model")


def _check_family(found: Recipe, where: str) -> None:
    own, its = family(found.model), algorithm_class(found.algorithm.name).family
    if its != own:
        fit = [name for name in ALGORITHMS if algorithm_class(name).family == own]
        raise UserError(
            f'{where}: algorithm "{found.algorithm.name}" is for models that '
            f"{'draw' if its == 'draws' else 'write'}, and model.name = "
            f'"{found.model.name}" {own}; use one of {", ".join(fit)}'
        )


def _check_track(names: Sequence[str], where: str) -> None:
    known = [*SHOWN, *TRACKERS]
    for name in names:
        if ":" not in name and name not in known:
            raise UserError(f'{where}: no tracker "{name}"{nearest(name, known)}')
        if names.count(name) > 1:
            raise UserError(f'{where}: track has "{name}" twice; once is enough')


def algorithm(found: Recipe) -> Algorithm:
    """Options within a section stand over those of the algorithm's own default: a recipe that
    sets one key of `advantage` does not reset the others. "none" turns one of those off."""
    entry = found.algorithm
    kind = algorithm_class(entry.name)
    default = {"name": entry.name} | _sections(kind)
    options = over(default, {"name": entry.name, **entry.options})
    return parse(kind, without_nothing(options), f"algorithm {entry.name}")


def _sections(kind: type[Any]) -> dict[str, Any]:
    """What the sections of an algorithm say by default."""
    return {
        name: field.default.model_dump(exclude_none=True)
        for name, field in kind.model_fields.items()
        if isinstance(field.default, BaseModel)
    }


def _said(chosen: Algorithm) -> dict[str, Any]:
    """All options of an algorithm, from which the same is made again: what a section has by default
    and this one has not is "none"."""
    said: dict[str, Any] = chosen.model_dump(exclude_none=True)  # type: ignore[attr-defined]
    for name, default in _sections(type(chosen)).items():
        own = said.get(name)
        if own is not None and own.get("kind") == default.get("kind"):
            said[name] = own | {key: NOTHING for key in default if key not in own}
    return said


def algorithm_class(name: str) -> type[Any]:
    found = imports.load(named(ALGORITHMS, name, "algorithm"), "algorithm")
    if imports.is_user_code(name):
        from gesso.algorithms.base import Algorithm

        _must_have(found, Algorithm, f'algorithm "{name}"')
        if not issubclass(found, Strict) or getattr(found, "family", None) not in FAMILIES:
            raise UserError(
                f'algorithm "{name}" must derive from gesso.config.Strict and have a family, one '
                f"of {', '.join(FAMILIES)}"
            )
    return found


def model(found: Recipe) -> FlowModel | TokenModel:
    made = model_class(found.model.name)(found.model, found.seed)
    if isinstance(found.model, Model):
        from gesso.models.flow.compiled import sizes
        from gesso.models.flow.pipeline import PipelineModel

        if isinstance(made, PipelineModel):
            made.sizes = sizes(found.sampler.batch, found.learner.micro_batch)
    return made


def model_class(name: str) -> Any:
    found = imports.load(named(MODELS, name, "model"), "model")
    if imports.is_user_code(name):
        from gesso.models.flow.base import FlowModel

        _must_have(found, FlowModel, f'model "{name}"')
    return found


def critic(found: Recipe, chosen: Algorithm, made: Any) -> Critic | None:
    """The critic that an algorithm asks for, known to the model from here on."""
    from gesso.algorithms.ppo import PPO

    if not isinstance(chosen, PPO):
        return None
    from gesso.models.tokens import critic

    assert isinstance(found.model, TokenModelSection)
    wanted = chosen.critic
    made.critic = critic.make(made, found.model, wanted.trunk, wanted.lr, found.seed)
    return made.critic


def check_trackers(found: Recipe) -> None:
    """Raises where a tracker's package is not installed."""
    for name in found.track:
        if name in TRACKERS and not imports.is_installed(name):
            raise UserError(
                f'track has "{name}", whose package is not here: pip install "gesso[{name}]"'
            )
        if imports.is_user_code(name):
            _check_tracker(name)


def _check_tracker(name: str) -> None:
    from gesso.track.trackers.base import Batched, Tracker

    found = imports.load(name, "tracker")
    batched = isinstance(found, type) and hasattr(found, "log_rows")
    _must_have(found, Batched if batched else Tracker, f'tracker "{name}"')


def trackers(found: Recipe, run: Path, tell: Callable[[str], None]) -> list[Tracked]:
    """The services of `track`; they start when the run does."""
    names = [name for name in found.track if name not in SHOWN]
    config = found.model_dump()
    return [
        Tracked(name, TRACKERS.get(name, name), run, config, found.tracker, tell) for name in names
    ]


def sampler(found: Recipe, made: FlowModel | TokenModel) -> Sampler:
    """What draws from it in a run: the engine of the recipe."""
    if found.sampler.engine == "built-in":
        return own_sampler(found, made)
    from gesso.samplers.vllm import VllmSampler

    assert isinstance(found.model, TokenModelSection)
    longest = found.model.max_prompt + algorithm(found).max_tokens  # type: ignore[attr-defined]
    return VllmSampler(made, found.sampler, longest, found.seed)  # type: ignore[arg-type]


def own_sampler(found: Recipe, made: FlowModel | TokenModel) -> Sampler:
    """The loop that draws from it without another engine: denoising or decoding."""
    if family(found.model) == "draws":
        from gesso.samplers.denoise import DenoisingSampler

        return DenoisingSampler(made, found.sampler.batch)  # type: ignore[arg-type]
    from gesso.samplers.decode import DecodingSampler

    return DecodingSampler(made, found.sampler.batch)  # type: ignore[arg-type]


def user_code(found: Recipe) -> list[tuple[str, str]]:
    """Code outside Gesso that a recipe names: ("reward", "my_reward:redness"). Imports nothing."""
    here = [entry for entry in (*found.reward, *found.eval_reward) if entry.remote is None]
    names = [
        ("model", found.model.name),
        ("algorithm", found.algorithm.name),
        *(("reward", entry.name) for entry in here),
        *(("tracker", name) for name in found.track),
    ]
    return list(dict.fromkeys((what, name) for what, name in names if imports.is_user_code(name)))


def announce_code(found: Recipe, place: str | Path, *kinds: str) -> None:
    """Called before code of these kinds is imported, for a recipe that may be somebody else's. It
    goes to stderr whatever the display: neither a foreign file nor --quiet can switch it off."""
    code = ", ".join(f'{what} "{name}"' for what, name in user_code(found) if what in kinds)
    if code:
        print(f"{place} runs code that is not part of Gesso: {code}", file=sys.stderr)


def _must_have(found: Any, protocol: type, what: str) -> None:
    """Raises unless `found` is a class with the methods of a protocol."""
    if not isinstance(found, type):
        raise UserError(f"{what} is a {type(found).__name__}; expected a class")
    methods = [name for name, value in vars(protocol).items() if inspect.isfunction(value)]
    missing = [name for name in methods if not name.startswith("_") and not _has(found, name)]
    if getattr(found, "_is_protocol", False):
        raise UserError(f"{what} is a protocol; expected a class that can be made")
    if missing:
        raise UserError(
            f"{what} has no {', '.join(missing[:4])}{' …' if missing[4:] else ''}; expected the "
            f"methods of gesso's {protocol.__name__}"
        )


def _has(found: type, name: str) -> bool:
    try:
        return hasattr(found, name)
    except Exception:  # a metaclass of the user's
        return False

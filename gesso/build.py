"""Names in a recipe → objects. The only tables of names; user code comes in as "module:Name"."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from gesso import agreement
from gesso.config import Model, Recipe, RewardEntry, family
from gesso.config import TokenModel as TokenModelSection
from gesso.parsing import nearest, parse
from gesso.rewards import base, deqa, judge, networks
from gesso.rewards.cache import Cached
from gesso.rewards.compose import Fitting, Weighted
from gesso.rewards.deqa import Rated
from gesso.rewards.remote import Remote
from gesso.rewards.service import RewardService
from gesso.rewards.workers import Workers
from gesso.tables import NOTHING, changed, over, read_recipe, without_nothing
from gesso.track.trackers.process import Tracked
from gesso.types import Prompt, UserError

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
REWARDS = {
    "ocr": "gesso.rewards.ocr:Ocr",
    "jpeg-compressibility": "gesso.rewards.jpeg:JpegCompressibility",
    "pickscore": "gesso.rewards.pickscore:PickScore",
    "geneval": "gesso.rewards.geneval:Geneval",
    "judge": "gesso.rewards.judge:Judge",
    "unified-reward": "gesso.rewards.judge:UnifiedReward",
    "unified-reward-vllm": "gesso.rewards.judge:UnifiedReward",
    "qwenvl-score": "gesso.rewards.judge:QwenVlScore",
    "qwenvl-ocr": "gesso.rewards.judge:QwenVlOcr",
    "qwenvl-ocr-vllm": "gesso.rewards.judge:QwenVlOcr",
    "paddle-ocr": "gesso.rewards.ocr:Ocr",  # what Flow-GRPO calls it
    "clip-score": "gesso.rewards.clip_score:ClipScore",
    "aesthetic": "gesso.rewards.aesthetic:Aesthetic",
    "image-reward": "gesso.rewards.image_reward:ImageReward",
    "hps": "gesso.rewards.hps:Hps",
    "jpeg-incompressibility": "gesso.rewards.jpeg:JpegIncompressibility",
    "sign-colour": "gesso.rewards.sign_colour:SignColour",
    "math": "gesso.rewards.maths:Math",
    "format": "gesso.rewards.format:Format",
    "count": "gesso.rewards.count:Count",
    "choice": "gesso.rewards.choice:Choice",
    "overlong": "gesso.rewards.overlong:Overlong",
}
TRACKERS = {
    "tensorboard": "gesso.track.trackers.tensorboard:TensorBoard",
    "wandb": "gesso.track.trackers.wandb:Wandb",
    "swanlab": "gesso.track.trackers.swanlab:SwanLab",
    "mlflow": "gesso.track.trackers.mlflow:MLflow",
}
SHOWN = ("console", "jsonl")  # what `track` may name beside them; metrics.jsonl is always written
SERVED = {"deqa": deqa.SCALE}  # rewards of environments of their own, behind HTTP only


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
        "reward": [_filled(entry) for entry in found.reward],
        "eval_reward": [_filled(entry) for entry in found.eval_reward],
    }
    return parse(Recipe, filled, where)


def _check_model(data: Mapping[str, Any]) -> None:
    """Its name decides which keys it has: a typo in it must not be told as one in those."""
    section = data.get("model")
    name = section.get("name") if isinstance(section, Mapping) else None
    if isinstance(name, str):
        _reference(MODELS, name, "model")


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
    return _import(_reference(ALGORITHMS, name, "algorithm"))


def model(found: Recipe) -> FlowModel | TokenModel:
    made = model_class(found.model.name)(found.model, found.seed)
    if isinstance(found.model, Model):
        from gesso.models.flow.compiled import sizes
        from gesso.models.flow.pipeline import PipelineModel

        if isinstance(made, PipelineModel):
            made.sizes = sizes(found.sampler.batch, found.learner.micro_batch)
    return made


def model_class(name: str) -> Any:
    return _import(_reference(MODELS, name, "model"))


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
        if name in TRACKERS and importlib.util.find_spec(name) is None:
            raise UserError(
                f'track has "{name}", whose package is not here: pip install "gesso[{name}]"'
            )
        if ":" in name:
            _import(name)


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


@dataclass(frozen=True)
class Readers:
    """The rewards of one purpose, as far as reading prompts goes."""

    rewards: Mapping[str, base.Reward]
    optional: Collection[str] = ()  # names of those that need not score every prompt

    def unfit(self, prompt: Prompt) -> str | None:
        """Why a reward that must cannot score this prompt, or all cannot; or None."""
        reasons = {name: reward.unfit(prompt) for name, reward in self.rewards.items()}
        told = {name: f"{name}: {reason}" for name, reason in reasons.items() if reason}
        must = [name for name in told if name not in self.optional]
        if must or len(told) == len(self.rewards):
            return told[must[0]] if must else "; ".join(told.values())
        return None


@dataclass(frozen=True)
class Rewards:
    service: RewardService
    train: Readers
    held_out: Readers


def rewards(found: Recipe) -> Rewards:
    made: list[tuple[RewardEntry, base.Reward, base.Scorer]] = []

    def once(entry: RewardEntry) -> tuple[base.Reward, base.Scorer]:
        """A reward that training and evaluation set up alike is made once, and runs in one place
        for both."""
        bare = entry.model_copy(update={"weight": 1.0})
        for known, reward, place in made:
            if known == bare:
                return reward, place
        reward = _reward(entry)
        made.append((bare, reward, scorer(entry, reward)))
        return made[-1][1:]

    purposes = found.reward, found.eval_reward or found.reward
    train, held_out = (
        Readers({e.name: once(e)[0] for e in p}, [e.name for e in p if e.optional])
        for p in purposes
    )
    weighted = [[Weighted(e.name, e.weight, once(e)[1]) for e in p] for p in purposes]
    return Rewards(RewardService(*weighted), train, held_out)


def reward_entry(name: str, overrides: Sequence[str], workers: int) -> RewardEntry:
    """A reward by itself, as `gesso serve-reward` has it."""
    data = changed({"name": name, "workers": workers}, overrides)
    return parse(RewardEntry, data, f"reward {name}")


def scorer(entry: RewardEntry, reward: base.Reward | None = None) -> base.Scorer:
    """A reward for one run."""
    reward = reward or _reward(entry)
    place = _remembering(entry, reward, _runner(entry, reward))
    return Fitting(place, reward) if entry.optional else place


def served(entry: RewardEntry, batch: int) -> base.Scorer:
    """A reward for many callers, whose samples are put together into batches."""
    from gesso.rewards.serve import Batcher

    reward = _reward(entry)
    place = _runner(entry, reward, batch)
    batched = Batcher(place, batch, entry.workers) if isinstance(place, Workers) else place
    return _remembering(entry, reward, batched)


def _remembering(entry: RewardEntry, reward: base.Reward, place: base.Scorer) -> base.Scorer:
    if not entry.cache or base.is_random(reward):
        return place
    return Cached(place, json.dumps([entry.name, entry.options], default=str))


def _runner(entry: RewardEntry, reward: base.Reward, batch: int = 4) -> base.Scorer:
    """Where a reward runs: on servers, on the event loop, or in `workers` processes that take up to
    `batch` samples at a time."""
    if entry.remote is not None:
        remote = Remote(entry.remote)
        return Rated(remote, SERVED[entry.name]) if entry.name in SERVED else remote
    if isinstance(reward, judge.Asks):
        return judge.Bench(reward)
    reference = _reference(REWARDS, entry.name, "reward")
    at_once = max(batch, reward.batch) if isinstance(reward, networks.Network) else batch
    place = Workers(reference, entry.options, entry.workers, at_once, entry.patience)
    place.random = base.is_random(reward)
    return place


def _reward(entry: RewardEntry) -> base.Reward:
    if entry.remote is not None:
        return _elsewhere(entry)
    if entry.name in SERVED:
        raise UserError(f'the reward "{entry.name}" runs on a server: give reward.remote.urls')
    return base.load(_reference(REWARDS, entry.name, "reward"), entry.options, entry.name)


def _elsewhere(entry: RewardEntry) -> base.Reward:
    """Who answers for a reward on a server: where we have it too, ours says which prompts fit."""
    if entry.options:
        raise UserError(
            f'reward "{entry.name}" runs on a server, which has its own options: give '
            f"{', '.join(entry.options)} to `gesso serve-reward`, not to the recipe"
        )
    if entry.name not in REWARDS:
        return base.Elsewhere()
    try:
        return base.load(REWARDS[entry.name], {})
    except UserError:  # it cannot be made without options, and only the server has them
        return base.Elsewhere()


def _filled(entry: RewardEntry) -> dict[str, Any]:
    """The entry with every option of its reward said. A class of the user's own is not made for
    that: it may load a network."""
    options = entry.options
    if entry.remote is not None or entry.name in SERVED:
        _reward(entry)
    else:
        reference = _reference(REWARDS, entry.name, "reward")
        found = base.find(reference, options)
        if isinstance(found, type) and issubclass(found, base.Strict):
            made = base.load(reference, options, entry.name)
            options = made.model_dump(exclude_none=True)  # type: ignore[attr-defined]
    return entry.model_dump(exclude_none=True) | options


def _reference(table: Mapping[str, str], name: str, what: str) -> str:
    if ":" in name:
        return name
    if name not in table:
        raise UserError(f'no {what} "{name}"{nearest(name, table)}, or "module:Name" of your own')
    return table[name]


def _import(reference: str) -> type[Any]:
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f'"{reference}" cannot be imported: {error}') from error

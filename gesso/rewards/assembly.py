"""Entries of a recipe → rewards and where they run. The only table of rewards' names."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gesso.config import AnyModel, Recipe, RewardEntry
from gesso.config.parsing import named, parse
from gesso.config.tables import changed
from gesso.rewards import base
from gesso.rewards.compose import Fitting, Weighted
from gesso.rewards.image import deqa, networks
from gesso.rewards.image.deqa import Rated
from gesso.rewards.judges import judge
from gesso.rewards.styles import STYLES
from gesso.rewards.transport.cache import Cached
from gesso.rewards.transport.remote import Remote
from gesso.rewards.transport.service import RewardService
from gesso.rewards.transport.workers import Workers
from gesso.types import Prompt, UserError

REWARDS = {
    "ocr": "gesso.rewards.image.ocr:Ocr",
    "jpeg-compressibility": "gesso.rewards.image.jpeg:JpegCompressibility",
    "pickscore": "gesso.rewards.image.pickscore:PickScore",
    "geneval": "gesso.rewards.image.geneval:Geneval",
    "judge": "gesso.rewards.judges.judge:Judge",
    "unified-reward": "gesso.rewards.judges.judge:UnifiedReward",
    "unified-reward-vllm": "gesso.rewards.judges.judge:UnifiedReward",
    "qwenvl-score": "gesso.rewards.judges.judge:QwenVlScore",
    "qwenvl-ocr": "gesso.rewards.judges.judge:QwenVlOcr",
    "qwenvl-ocr-vllm": "gesso.rewards.judges.judge:QwenVlOcr",
    "paddle-ocr": "gesso.rewards.image.ocr:Ocr",  # what Flow-GRPO calls it
    "clip-score": "gesso.rewards.image.clip_score:ClipScore",
    "aesthetic": "gesso.rewards.image.aesthetic:Aesthetic",
    "image-reward": "gesso.rewards.image.image_reward:ImageReward",
    "hps": "gesso.rewards.image.hps:Hps",
    "jpeg-incompressibility": "gesso.rewards.image.jpeg:JpegIncompressibility",
    "sign-colour": "gesso.rewards.image.sign_colour:SignColour",
    "math": "gesso.rewards.text.maths:Math",
    "format": "gesso.rewards.text.format:Format",
    "count": "gesso.rewards.text.count:Count",
    "choice": "gesso.rewards.text.choice:Choice",
    "overlong": "gesso.rewards.text.overlong:Overlong",
}
SERVED = {"deqa": deqa.SCALE}  # rewards of environments of their own, behind HTTP only


@dataclass(frozen=True)
class Readers:
    """The rewards of one purpose, as far as reading prompts goes."""

    rewards: Mapping[str, base.Reward]
    optional: Collection[str] = ()  # names of those that need not score every prompt

    def unfit(self, prompt: Prompt) -> str | None:
        """Why a reward that must cannot score this prompt, or all cannot; or None."""
        reasons = {name: base.unfit(reward, prompt, name) for name, reward in self.rewards.items()}
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


def rewards(recipe: Recipe) -> Rewards:
    """The rewards of a run."""
    return of_entries(recipe.reward, recipe.eval_reward or recipe.reward, recipe.model)


def of_entries(
    train: Sequence[RewardEntry], held_out: Sequence[RewardEntry], model: AnyModel
) -> Rewards:
    """Rewards for training and for held-out prompts, of samples of a model."""
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

    purposes = train, held_out
    _check_entries([*train, *held_out], model)
    readers = [
        Readers({e.label: once(e)[0] for e in p}, [e.label for e in p if e.optional])
        for p in purposes
    ]
    weighted = [[Weighted(e.label, e.weight, once(e)[1]) for e in p] for p in purposes]
    return Rewards(RewardService(*weighted), *readers)


def _check_entries(entries: Sequence[RewardEntry], model: AnyModel) -> None:
    """Raises where two rewards would share their metrics, or one reads what the model draws."""
    labels: dict[str, str] = {}
    for entry in entries:
        other = labels.setdefault(entry.label, entry.name)
        if other != entry.name:
            raise UserError(
                f'the rewards "{other}" and "{entry.name}" would both be called "{entry.label}" in '
                "the metrics; rename a file or a folder"
            )
        if STYLES[entry.style].text_only and model.output != "text":
            raise UserError(
                f'reward "{entry.name}": style = "{entry.style}" scores text, and model.name = '
                f'"{model.name}" draws images; use a function of samples, style = "gesso"'
            )


def reward_entry(name: str, overrides: Sequence[str], workers: int) -> RewardEntry:
    """A reward by itself, as `gesso serve-reward` has it."""
    data = changed({"name": name, "workers": workers}, overrides)
    return parse(RewardEntry, data, f"reward {name}")


def scorer(entry: RewardEntry, reward: base.Reward | None = None) -> base.Scorer:
    """A reward for one run."""
    reward = reward or _reward(entry)
    place = _remembering(entry, reward, _runner(entry, reward))
    return Fitting(place, reward, entry.label) if entry.optional else place


def served(entry: RewardEntry, batch: int) -> base.Scorer:
    """A reward for many callers, whose samples are put together into batches."""
    from gesso.rewards.transport.serve import Batcher

    reward = _reward(entry)
    place = _runner(entry, reward, batch)
    batched = Batcher(place, batch, entry.workers) if isinstance(place, Workers) else place
    return _remembering(entry, reward, batched)


def _remembering(entry: RewardEntry, reward: base.Reward, place: base.Scorer) -> base.Scorer:
    if not entry.cache or base.is_random(reward):
        return place
    return Cached(place, json.dumps([entry.name, entry.style, entry.options], default=str))


def _runner(entry: RewardEntry, reward: base.Reward, batch: int = 4) -> base.Scorer:
    """Where a reward runs: on servers, on the event loop, or in `workers` processes that take up to
    `batch` samples at a time."""
    if entry.remote is not None:
        remote = Remote(entry.remote)
        return Rated(remote, SERVED[entry.name]) if entry.name in SERVED else remote
    if isinstance(reward, judge.Asks):
        return judge.Bench(reward)
    reference = named(REWARDS, entry.name, "reward")
    at_once = max(batch, reward.batch) if isinstance(reward, networks.Network) else batch
    return Workers(
        reference,
        entry.options,
        entry.workers,
        at_once,
        entry.patience,
        entry.style,
        base.is_random(reward),
    )


def _reward(entry: RewardEntry) -> base.Reward:
    if entry.remote is not None:
        return _elsewhere(entry)
    if entry.name in SERVED:
        raise UserError(f'the reward "{entry.name}" runs on a server: give reward.remote.urls')
    reference = _reward_reference(entry)
    return base.load(reference, entry.options, entry.name, entry.style)


def _reward_reference(entry: RewardEntry) -> str:
    if entry.style != "gesso" and entry.name in REWARDS:
        raise UserError(
            f'reward "{entry.name}" is one of Gesso\'s; style = "{entry.style}" is for functions '
            'of your own, "module:Name" or "file.py:Name"'
        )
    return named(REWARDS, entry.name, "reward")


def _elsewhere(entry: RewardEntry) -> base.Reward:
    """Who answers for a reward on a server: where we have it too, ours says which prompts fit."""
    if entry.options:
        raise UserError(
            f'reward "{entry.name}" runs on a server, which has its own options: give '
            f"{', '.join(entry.options)} to `gesso serve-reward`, not to the recipe"
        )
    if entry.style != "gesso":
        raise UserError(
            f'reward "{entry.name}" runs on a server: give style={entry.style} to '
            "`gesso serve-reward`, not to the recipe"
        )
    if entry.name not in REWARDS:
        return base.Elsewhere()
    try:
        return base.load(REWARDS[entry.name], {})
    except UserError:  # it cannot be made without options, and only the server has them
        return base.Elsewhere()


def resolved(entry: RewardEntry) -> dict[str, Any]:
    """The entry with every option of its reward said. A class of the user's own is not made for
    that: it may load a network."""
    options = entry.options
    if entry.remote is not None or entry.name in SERVED:
        _reward(entry)
    else:
        reference = _reward_reference(entry)
        found = base.find(reference, options, entry.style)
        if isinstance(found, type) and issubclass(found, base.Strict):
            made = base.load(reference, options, entry.name)
            options = made.model_dump(exclude_none=True)  # type: ignore[attr-defined]
    return entry.model_dump(exclude_none=True) | options

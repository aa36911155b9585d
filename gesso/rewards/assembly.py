"""Builds rewards and their scorers from recipe entries. The only table of reward names."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gesso import imports
from gesso.config import AnyModel, Model, Recipe, RewardEntry, Strict
from gesso.config.parsing import named, parse
from gesso.config.tables import changed
from gesso.rewards import base, differentiable, environments
from gesso.rewards.compose import OptionalScorer, WeightedReward
from gesso.rewards.differentiable import RewardSum, WeightedValues
from gesso.rewards.frames import FrameChoice, FrameScorer
from gesso.rewards.image.networks import NetworkReward
from gesso.rewards.judges import deqa, heads
from gesso.rewards.judges.chat import ServedJudge
from gesso.rewards.styles import STYLES
from gesso.rewards.transport.cache import CachedScorer
from gesso.rewards.transport.remote import RemoteScorer
from gesso.rewards.transport.service import RewardService
from gesso.rewards.transport.workers import WorkerScorer
from gesso.types import Prompt, UserError

REWARDS = {
    "ocr": "gesso.rewards.image.ocr:Ocr",
    "ocr-letters": "gesso.rewards.image.ocr_letters:OcrLetters",
    "jpeg-compressibility": "gesso.rewards.image.jpeg:JpegCompressibility",
    "pickscore": "gesso.rewards.image.pickscore:PickScore",
    "geneval": "gesso.rewards.image.geneval:Geneval",
    "geneval2": "gesso.rewards.judges.geneval2:Geneval2",
    "judge": "gesso.rewards.judges.judge:Judge",
    "win-rate": "gesso.rewards.judges.win_rate:WinRate",
    "unified-reward": "gesso.rewards.judges.unified_reward:UnifiedReward",
    "unified-reward-vllm": "gesso.rewards.judges.unified_reward:UnifiedReward",
    "qwenvl-score": "gesso.rewards.judges.qwen_vl:QwenVlScore",
    "qwenvl-ocr": "gesso.rewards.judges.qwen_vl:QwenVlOcr",
    "qwenvl-ocr-vllm": "gesso.rewards.judges.qwen_vl:QwenVlOcr",
    "paddle-ocr": "gesso.rewards.image.ocr:Ocr",  # its name in Flow-GRPO
    "clip-score": "gesso.rewards.image.clip_score:ClipScore",
    "aesthetic": "gesso.rewards.image.aesthetic:Aesthetic",
    "image-reward": "gesso.rewards.image.image_reward:ImageReward",
    "hps": "gesso.rewards.image.hps:Hps",
    "hpsv3": "gesso.rewards.image.hpsv3:HpsV3",
    "jpeg-incompressibility": "gesso.rewards.image.jpeg:JpegIncompressibility",
    "unchanged": "gesso.rewards.image.unchanged:Unchanged",
    "motion": "gesso.rewards.video.motion:Motion",
    "temporal-consistency": "gesso.rewards.video.consistency:TemporalConsistency",
    "first-frame": "gesso.rewards.video.first_frame:FirstFrame",
    "edit-score": "gesso.rewards.judges.edit_score:EditScore",
    "diversity": "gesso.rewards.diversity:Diversity",
    "sign-colour": "gesso.rewards.image.sign_colour:SignColour",
    "sign-edit": "gesso.rewards.image.sign_edit:SignEdit",
    "sign-motion": "gesso.rewards.video.sign_motion:SignMotion",
    "math": "gesso.rewards.text.maths:Math",
    "format": "gesso.rewards.text.format:Format",
    "count": "gesso.rewards.text.count:Count",
    "choice": "gesso.rewards.text.choice:Choice",
    "overlong": "gesso.rewards.text.overlong:Overlong",
}


@dataclass(frozen=True)
class Served:
    """A reward with a separate environment, over HTTP only."""

    scorer: Callable[[base.Scorer], base.Scorer]  # converts what the server returns
    local: type[base.RemoteReward] = base.RemoteReward  # checks prompts


SERVED = {
    "deqa": Served(deqa.scaled),
    "edit-reward": Served(heads.edit_reward, heads.OfEdits),
    "video-align": Served(heads.video_align),
}


@dataclass(frozen=True)
class PromptCheck:
    """Checks which prompts the rewards of one purpose (training or evaluation) can score."""

    rewards: Mapping[str, base.AnyReward]
    optional: Collection[str] = ()  # names of rewards that need not score every prompt

    def unfit(self, prompt: Prompt) -> str | None:
        """Why a required reward, or every reward, cannot score this prompt; or None."""
        reasons = {name: base.unfit(reward, prompt, name) for name, reward in self.rewards.items()}
        errors = {name: f"{name}: {reason}" for name, reason in reasons.items() if reason}
        required = [name for name in errors if name not in self.optional]
        if required:
            return errors[required[0]]
        return "; ".join(errors.values()) if 0 < len(errors) == len(self.rewards) else None


@dataclass(frozen=True)
class Rewards:
    service: RewardService
    train: PromptCheck
    held_out: PromptCheck


def rewards(recipe: Recipe) -> Rewards:
    """The rewards of a run. Samples of the data are not scored: `reward` is for evaluations."""
    train = [] if recipe.sampler.engine == "data" else recipe.reward
    held_out = recipe.eval_reward or recipe.reward
    return of_entries(train, held_out, recipe.model, recipe.eval.frames)


def of_entries(
    train: Sequence[RewardEntry],
    held_out: Sequence[RewardEntry],
    model: AnyModel,
    eval_frames: int | None = None,
) -> Rewards:
    """Rewards for training and for held-out prompts of a model; `eval_frames` of samples of the
    latter, if they have others than `model.frames`."""
    built: list[tuple[RewardEntry, base.AnyReward, base.Scorer]] = []

    def once(entry: RewardEntry) -> tuple[base.AnyReward, base.Scorer]:
        """Training and evaluation share a reward and its scorer if only alias, weight and
        bounds differ."""
        key = entry.model_copy(update={"alias": None, "weight": 1.0, "ramp": None, "bounds": None})
        for built_entry, reward, built_scorer in built:
            if built_entry == key:
                return reward, built_scorer
        reward = _reward(entry)
        built.append((key, reward, scorer(entry, reward)))
        return built[-1][1:]

    _check_entries([*train, *held_out], model)
    if isinstance(model, Model):
        most = max(model.frames, eval_frames or 1)
        _check_frames(train, "model.frames", model.frames, most)
        key = "model.frames" if eval_frames is None else "eval.frames"
        _check_frames(held_out, key, eval_frames or model.frames, most)
        if most > 1:
            train, held_out = (list(map(_over_all_frames, p)) for p in (train, held_out))
    purposes = train, held_out
    checks = [
        PromptCheck({e.label: once(e)[0] for e in p}, [e.label for e in p if e.optional])
        for p in purposes
    ]
    weighted = [
        [WeightedReward(e.label, e.weight, once(e)[1], e.bounds) for e in p] for p in purposes
    ]
    return Rewards(RewardService(*weighted), *checks)


def check_differentiable(entries: Sequence[RewardEntry], algorithm: str) -> None:
    """Raises for a reward with a weight that has no gradient."""
    for entry in _weighted(entries):
        if entry.ramp is not None:
            raise UserError(
                f'reward "{entry.name}": algorithm "{algorithm}", which differentiates the reward, '
                "does not support ramp; remove it"
            )
        why = differentiable.fault(None if entry.name in SERVED else _class_of(entry))
        if entry.remote is not None:
            why = "runs on a server"
        elif entry.env is not None:
            why = "runs in an environment of its own"
        if why is None:
            continue
        places = {name: imports.load(place, "reward") for name, place in REWARDS.items()}
        known = [name for name, kind in places.items() if differentiable.fault(kind) is None]
        raise UserError(
            f'reward "{entry.name}" {why}, but algorithm "{algorithm}" needs the gradient of every '
            f"reward with a weight; use one of {', '.join(known)}, or a class with "
            "differentiable = True and values(images, prompts)"
        )


def with_gradient(entries: Sequence[RewardEntry]) -> RewardSum:
    """The rewards of `check_differentiable`, in this process."""
    return RewardSum(
        [
            WeightedValues(
                entry.label,
                entry.weight,
                _reward(entry),
                entry.bounds,
                entry.optional,
                _frame_choice(_over_all_frames(entry)),
            )
            for entry in _weighted(entries)
        ]
    )


def _weighted(entries: Sequence[RewardEntry]) -> list[RewardEntry]:
    return [entry for entry in entries if entry.weight != 0]


def _class_of(entry: RewardEntry) -> Any:
    return base.find(_reward_reference(entry), entry.options, entry.style)


def _check_entries(entries: Sequence[RewardEntry], model: AnyModel) -> None:
    """Raises if two rewards have the same metric name, or a text reward scores an image model."""
    labels: dict[str, str] = {}
    for entry in entries:
        other = labels.setdefault(entry.label, entry.name)
        if other != entry.name:
            raise UserError(
                f'the rewards "{other}" and "{entry.name}" would both have the metric name '
                f'"{entry.label}"; set alias in one of them'
            )
        if entry.env is not None and (entry.remote is not None or _is_judge(entry)):
            raise UserError(
                f'reward "{entry.name}" runs on a server, where reward.env has no effect; remove it'
            )
        if entry.frames is not None and _scores_videos(entry):
            raise UserError(
                f'reward "{entry.name}" scores whole videos; remove frames = "{entry.frames}"'
            )
        if STYLES[entry.style].text_only and model.output != "text":
            raise UserError(
                f'reward "{entry.name}": style = "{entry.style}" scores text, but model.name = '
                f'"{model.name}" generates images; use a function of samples, style = "gesso"'
            )


def _check_frames(entries: Sequence[RewardEntry], key: str, frames: int, most: int) -> None:
    """Raises for a reward that does not fit samples of `frames` frames; others have `most`."""
    for entry in entries:
        fault, choice = None, _frame_choice(entry)
        if frames == 1 and _scores_only_videos(entry):
            fault = f"it scores videos, got {key} = 1; use another reward, or a video model"
        elif choice is not None and most == 1:
            fault = f'frames = "{entry.frames}" is for videos, got {key} = 1; remove it'
        elif choice is not None and frames > 1:
            fault = choice.fault(frames)
        if fault is not None:
            raise UserError(f'reward "{entry.name}": {fault}')


def _is_bundled(entry: RewardEntry) -> bool:
    return entry.name in SERVED or entry.name in REWARDS


def _scores_videos(entry: RewardEntry) -> bool:
    """Whether the class declares `of_videos = True`: it reads all frames of a sample."""
    if entry.name in SERVED:
        return entry.name == "video-align"
    if entry.remote is not None and entry.name not in REWARDS:
        return False
    return differentiable.of_videos(_class_of(entry))


def _scores_only_videos(entry: RewardEntry) -> bool:
    """Whether a bundled reward scores only videos; judges score videos and images."""
    if entry.name not in REWARDS:
        return entry.name == "video-align"
    return imports.attribute(_class_of(entry), "only_videos") is True


def _over_all_frames(entry: RewardEntry) -> RewardEntry:
    """For video models, bundled image rewards default to the mean over all frames."""
    if entry.frames is not None or not _is_bundled(entry) or _scores_videos(entry):
        return entry
    return entry.model_copy(update={"frames": "mean"})


def _frame_choice(entry: RewardEntry) -> FrameChoice | None:
    return None if entry.frames is None else FrameChoice(entry.frames, entry.every)


def _is_judge(entry: RewardEntry) -> bool:
    kind = _class_of(entry)
    return isinstance(kind, type) and issubclass(kind, ServedJudge)


def reward_entry(name: str, overrides: Sequence[str], workers: int) -> RewardEntry:
    """The entry of a single reward, for `gesso serve-reward`."""
    data = changed({"name": name, "workers": workers}, overrides)
    return parse(RewardEntry, data, f"reward {name}")


def scorer(entry: RewardEntry, reward: base.AnyReward | None = None) -> base.Scorer:
    """The scorer of a reward in one run."""
    reward = reward or _reward(entry)
    inner = _over_frames(entry, _cached(entry, reward, _uncached_scorer(entry, reward)))
    return OptionalScorer(inner, reward, entry.label) if entry.optional else inner


def served(entry: RewardEntry, batch: int) -> base.Scorer:
    """The scorer of a reward on a server: samples of all clients share batches."""
    from gesso.rewards.transport.serve import BatchingScorer

    reward = _reward(entry)
    inner = _uncached_scorer(entry, reward, batch)
    if isinstance(inner, WorkerScorer):
        inner = BatchingScorer(inner, batch, entry.workers)
    return _over_frames(entry, _cached(entry, reward, inner))


def _over_frames(entry: RewardEntry, inner: base.Scorer) -> base.Scorer:
    choice = _frame_choice(entry)
    return inner if choice is None else FrameScorer(inner, choice)


def _cached(entry: RewardEntry, reward: base.AnyReward, inner: base.Scorer) -> base.Scorer:
    if not entry.cache or base.is_random(reward):
        return inner
    return CachedScorer(inner, json.dumps([entry.name, entry.style, entry.options], default=str))


def _uncached_scorer(entry: RewardEntry, reward: base.AnyReward, batch: int = 4) -> base.Scorer:
    """Runs on servers, on the event loop, or in `workers` processes with up to `batch` samples at a
    time."""
    if entry.remote is not None:
        remote = RemoteScorer(entry.remote, is_groupwise(entry))
        if entry.name in SERVED:
            return SERVED[entry.name].scorer(remote)
        return remote
    if isinstance(reward, ServedJudge):
        return reward.scorer()
    reference = _reward_reference(entry)
    size = max(batch, reward.batch) if isinstance(reward, NetworkReward) else batch
    return WorkerScorer(
        reference,
        entry.options,
        entry.workers,
        size,
        entry.patience,
        entry.style,
        base.is_random(reward),
        base.is_groupwise(reward),
        None if entry.env is None else environments.python(entry.env),
    )


def _reward(entry: RewardEntry) -> base.AnyReward:
    if entry.remote is not None:
        return _remote_reward(entry)
    reference = _reward_reference(entry)
    return base.load(reference, entry.options, entry.name, entry.style)


def _reward_reference(entry: RewardEntry) -> str:
    if entry.style != "gesso" and entry.name in REWARDS:
        raise UserError(
            f'reward "{entry.name}" is built in; style = "{entry.style}" applies only to custom '
            'functions, "module:Name" or "file.py:Name"'
        )
    if entry.name in SERVED:
        raise UserError(f'reward "{entry.name}" runs only on a server; set reward.remote.urls')
    return named(REWARDS | dict.fromkeys(SERVED, ""), entry.name, "reward")


def is_groupwise(entry: RewardEntry) -> bool:
    """Whether the reward compares the samples of a prompt. Does not instantiate it."""
    if entry.remote is None:
        if entry.name in SERVED:
            return False
        reference = _reward_reference(entry)
        return base.is_groupwise(base.find(reference, entry.options, entry.style))
    bundled = entry.name in REWARDS and base.is_groupwise(
        imports.load(REWARDS[entry.name], "reward")
    )
    if bundled and entry.remote.protocol != "gesso":
        raise UserError(
            f'reward "{entry.name}" compares the samples of a prompt and requires '
            f'reward.remote.protocol = "gesso", got "{entry.remote.protocol}"'
        )
    return bundled or entry.remote.groupwise


def _remote_reward(entry: RewardEntry) -> base.AnyReward:
    """The local part of a reward on a server: a built-in reward checks the prompts here too."""
    if entry.options:
        raise UserError(
            f'reward "{entry.name}" runs on a server: pass its options '
            f"{', '.join(entry.options)} to `gesso serve-reward` instead of the recipe"
        )
    if entry.style != "gesso":
        raise UserError(
            f'reward "{entry.name}" runs on a server: pass style={entry.style} to '
            "`gesso serve-reward` instead of the recipe"
        )
    if entry.name in SERVED:
        return SERVED[entry.name].local()
    if entry.name not in REWARDS:
        return base.RemoteReward()
    try:
        return base.load(REWARDS[entry.name], {})
    except UserError:  # it requires options that only the server has
        return base.RemoteReward()


def resolved(entry: RewardEntry) -> dict[str, Any]:
    """The entry with defaults filled in for the reward's options. A custom class is not
    instantiated for that: it may load a network."""
    options = entry.options
    if entry.remote is not None or entry.name in SERVED:
        _reward(entry)
    else:
        reference = _reward_reference(entry)
        target = _class_of(entry)
        if isinstance(target, type) and issubclass(target, Strict):
            reward: Any = base.load(reference, options, entry.name)
            options = reward.model_dump(exclude_none=True)
    return entry.model_dump(exclude_none=True) | options

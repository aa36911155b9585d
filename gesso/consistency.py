"""Checks that sections of a recipe and its algorithm fit together. Those of single sections are in
`config/`, those of a family in `families/`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gesso.config import Recipe
from gesso.config.parsing import nearest
from gesso.config.schema import WARNINGS
from gesso.rewards.assembly import is_groupwise
from gesso.types import UserError

if TYPE_CHECKING:
    from gesso.algorithms.base import Algorithm

OF_RESPONSES = (
    "truncated-responses", "longer-responses", "entropy-collapse", "constant-length", "kl-explodes",
    "sampler-mismatch",
)  # fmt: skip
OF_WORKERS = ("idle-workers", "slow-worker")
OF_SAMPLES = ("reward-hacking", "flat-groups", "saturated", "old-samples", "diversity")


def check(recipe: Recipe, algorithm: Algorithm, where: str) -> None:
    _check_reactions(recipe, algorithm, where)
    _check_groups(recipe, algorithm, where)
    _check_gardo(recipe, algorithm, where)
    _check_expect(recipe, where)
    if recipe.partial:
        _check_partial(recipe, algorithm, where)


def _check_partial(recipe: Recipe, algorithm: Algorithm, where: str) -> None:
    """Continuing a response after a change of weights requires a language model and the built-in
    decoder."""
    name, engine = recipe.algorithm.name, recipe.sampler.engine
    unsupported = {
        f'requires a language model, but algorithm "{name}" is for flow models; remove it': (
            algorithm.family == "flow"
        ),
        f'requires the built-in decoder, got sampler.engine = "{engine}"; remove one of them': (
            engine != "built-in"
        ),
        f"requires lag of at least 2, the rounds of a response, got lag = {recipe.lag}": (
            recipe.lag < 2
        ),
        f'does not support the greedy baseline of algorithm "{name}"; use another algorithm, such '
        "as grpo": algorithm.greedy_spec() is not None,
    }
    for reason, applies in unsupported.items():
        if applies:
            raise UserError(f"{where}: partial = true {reason}")


def _check_reactions(recipe: Recipe, algorithm: Algorithm, where: str) -> None:
    """Rejects reactions to unknown warnings, and those that could not happen."""
    for kind, reaction in recipe.on_symptom.items():
        if kind not in WARNINGS:
            hint = nearest(kind, WARNINGS)
            raise UserError(f'{where}: on_symptom: unknown warning "{kind}"{hint}')
        of_workers = kind in OF_WORKERS and recipe.cluster.workers is None
        if of_workers or (kind in OF_RESPONSES and algorithm.family == "flow"):
            raise UserError(
                f"{where}: on_symptom.{kind}: this run cannot have the warning, which is for "
                f"{'several workers' if of_workers else 'language models'}; remove it"
            )
        if kind == "clip-under-floor" and algorithm.clip_range is None:
            raise UserError(
                f"{where}: on_symptom.{kind}: this run cannot have the warning, as algorithm "
                f'"{recipe.algorithm.name}" clips no ratio; remove it'
            )
        if kind in OF_SAMPLES and recipe.sampler.engine == "data":
            raise UserError(
                f"{where}: on_symptom.{kind}: this run cannot have the warning, which is for "
                "generated training samples; remove it"
            )
        if kind == "reward-hacking" and not recipe.eval.every:
            raise UserError(
                f"{where}: on_symptom.reward-hacking compares evaluations; set eval.every"
            )
        if reaction == "raise_kl" and algorithm.with_kl(1.0) is None:
            raise UserError(
                f'{where}: on_symptom.{kind} = "raise_kl", but algorithm "{recipe.algorithm.name}" '
                "has no KL here; set its weight (algorithm.beta or algorithm.kl) if it has one, or "
                "use stop or lower_lr"
            )


def _check_groups(recipe: Recipe, algorithm: Algorithm, where: str) -> None:
    """Rewards that compare the samples of a prompt, and curricula, need at least two of them."""
    if recipe.data.curriculum is not None and algorithm.group < 2:
        raise UserError(
            f"{where}: data.curriculum uses the spread of a prompt's rewards and requires "
            f"algorithm.group of at least 2, got {algorithm.group}"
        )
    trained = [] if recipe.sampler.engine == "data" else recipe.reward
    for entry in filter(is_groupwise, trained):
        compares = f'{where}: the reward "{entry.name}" compares the samples of a prompt'
        if algorithm.group < 2:
            raise UserError(
                f"{compares} and requires algorithm.group of at least 2, got {algorithm.group}"
            )
        if algorithm.probe is not None:
            raise UserError(
                f"{compares}, but algorithm.probe divides a group into two parts; remove one of "
                "them"
            )
        if algorithm.greedy_spec() is not None:
            raise UserError(
                f'{compares}, but the greedy baseline of algorithm "{recipe.algorithm.name}" is '
                "one response; use another algorithm, such as grpo"
            )
    for entry in filter(is_groupwise, recipe.eval_reward or recipe.reward):
        if recipe.eval.samples < 2:
            raise UserError(
                f'{where}: the reward "{entry.name}" compares the samples of a prompt, but '
                "evaluations have one: set eval.samples, as in 4, or other rewards in "
                "[[eval_reward]]"
            )


def _check_gardo(recipe: Recipe, algorithm: Algorithm, where: str) -> None:
    """Rejects a gate without a KL or without rewards that could doubt a sample, and the renewal of
    a reference that nothing uses."""
    from gesso.algorithms.flow import FlowAlgorithm

    if not isinstance(algorithm, FlowAlgorithm):
        return
    for section, option in (("gate", algorithm.gate), ("renew", algorithm.renew)):
        if option is not None and algorithm.with_kl(1.0) is None:
            raise UserError(
                f"{where}: algorithm.{section} changes the KL, but algorithm "
                f'"{recipe.algorithm.name}" has no KL here; set its weight (algorithm.beta or '
                "algorithm.kl)"
            )
    weights = [entry.weight for entry in recipe.reward]
    if algorithm.gate is not None and (0 not in weights or not any(weights)):
        raise UserError(
            f"{where}: algorithm.gate compares the trained reward with rewards of weight 0, got "
            f"weights {', '.join(f'{weight:g}' for weight in weights)}; add a [[reward]] with "
            "weight = 0 next to the trained one"
        )
    if algorithm.gate is not None:
        for entry in recipe.reward:
            if entry.ramp is not None and 0 in (entry.ramp.start, entry.ramp.end):
                raise UserError(
                    f'{where}: the ramp of reward "{entry.name}" includes a weight of 0, but '
                    "algorithm.gate compares the trained rewards with those of weight 0; use a "
                    "start and an end above 0"
                )


def _check_expect(recipe: Recipe, where: str) -> None:
    """Rejects figures of a metric that evaluations do not have."""
    names = ["reward", *(entry.label for entry in recipe.eval_reward or recipe.reward)]
    if recipe.expect is not None and recipe.expect.figure.partition("/")[0] not in names:
        metrics = ", ".join(f"eval/{name}" for name in names)
        raise UserError(
            f'{where}: expect.metric = "{recipe.expect.metric}" is not a metric of its '
            f"evaluations; expected one of {metrics}, or a detail of one"
        )

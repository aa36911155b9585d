"""A plan as text and as data."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from gesso.plan.planner import Option, Plan

TASKS = {
    "open": "encoding all prompts in every worker",
    "sample": "sampling",
    "decode": "decoding images",
    "update": "forward and backward passes of the update",
    "exchange": "optimizer steps and gradient sums",
    "share": "sending the traces of all samples to all workers",
    "publish": "publishing weights",
    "save": "copying a checkpoint",
}
REMEDIES = {
    "open": "fewer prompts per step with larger groups, or fewer GPUs",
    "sample": "more GPUs, or fewer denoising steps or tokens",
    "decode": "more GPUs",
    "update": "more GPUs, or fewer trained steps or updates",
    "exchange": "a LoRA of lower rank, a faster network, or fewer GPUs",
    "share": "fewer GPUs, or fewer trained steps",
    "publish": "fewer copies of the weights",
    "save": "a larger save.every",
}


def report(
    plan: Plan, recipe: Sequence[str], overrides: Sequence[str], price: float, explain: bool
) -> str:
    """`recipe`: the arguments that name it, as `gesso train` expects them."""
    best = plan.best
    kept = [o for o in overrides if o.partition("=")[0] not in _keys(best)]
    command = shlex.join(["gesso", "train", *recipe, *kept, *best.settings])
    lines = [command, "", *_table([best, *plan.alternatives], price, "settings", _settings), ""]
    if len(plan.scaling) > 1:
        lines += [
            f"the best settings for other numbers of GPUs, up to one per sample ({samples(best)}), "
            "where these batches fit:"
        ]
    lines += [*_table(plan.scaling, price, "GPUs  settings", _scaled), ""]
    lines += [*plan.notes, _lag(plan), bound(best)]
    if explain:
        lines += ["", *_explained(best)]
    return "\n".join(line for line in lines if line is not None)


def data(plan: Plan, price: float) -> dict[str, Any]:
    def of(option: Option) -> dict[str, Any]:
        p = option.prediction
        return {
            "workers": option.workers,
            "settings": option.settings,
            "step_s": p.step,
            "evaluation_s": p.evaluation,
            "memory_gb": option.peak and option.peak / 1e9,
            "memory_gb_by_role": {role: size / 1e9 for role, size in option.memory.items()},
            "hours": option.hours,
            "cost": option.hours * option.workers * price,
            "shares": p.shares,
            "idle": p.idle,
        }

    return {
        "best": of(plan.best),
        "alternatives": [of(option) for option in plan.alternatives],
        "scaling": [of(option) for option in plan.scaling],
        "notes": list(plan.notes),
    }


def _keys(option: Option) -> set[str]:
    return {setting.partition("=")[0] for setting in option.settings}


def _settings(option: Option) -> str:
    return " ".join(option.settings[1:])


def _scaled(option: Option) -> str:
    return f"{option.workers:<4}  {_settings(option)}"


def _table(options: Sequence[Option], price: float, heading: str, label: Any) -> list[str]:
    names = [label(option) for option in options]
    width = max(len(heading), *(len(name) for name in names))
    head = f"{heading:<{width}}  {'s/step':>8}  {'samples/s':>9}  {'GB':>13}  {'idle':>4}"
    lines = [f"{head}  {'hours':>7}  {'cost':>9}"]
    for name, option in zip(names, options, strict=True):
        p = option.prediction
        memory = " + ".join(f"{size / 1e9:.3g}" for size in option.memory.values())
        cost = f"${option.hours * option.workers * price:,.0f}" if price else ""
        lines.append(
            f"{name:<{width}}  {_short(p.step):>8}  {samples(option) / p.step:>9.2f}  "
            f"{memory:>13}  {p.idle:>4.0%}  {option.hours:>7.1f}  {cost:>9}"
        )
    return lines


def _short(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.3g}"


def samples(option: Option) -> int:
    """Samples per step."""
    from gesso import build

    return option.recipe.data.groups * build.algorithm(option.recipe).group


def _lag(plan: Plan) -> str:
    options = [plan.best, *plan.alternatives]
    waits = next(o for o in options if not o.recipe.lag)
    if plan.best.recipe.lag:
        gain = 1 - plan.best.prediction.step / waits.prediction.step
        what = (
            "sampling and scoring overlap"
            if plan.best.recipe.cluster.samplers
            else "scoring overlaps"
        )
        return f"lag=1: {what} with the update, which makes a step {gain:.0%} shorter"
    overlaps = [o for o in options if o.recipe.lag and not o.recipe.cluster.samplers]
    if not overlaps:
        return "lag=0: the algorithm requires it"
    gain = 1 - overlaps[0].prediction.step / waits.prediction.step
    return f"lag=0: lag=1 would make a step {max(0.0, gain):.0%} shorter"


def bound(option: Option) -> str:
    """What takes most of a step, and what would shorten it."""
    p = option.prediction
    if p.waiting > max(p.shares.values(), default=0.0):
        return (
            f"limited by the rewards: workers wait {p.waiting:.0%} of a step for scores; use more "
            "reward workers or servers"
        )
    phase, share = max(p.shares.items(), key=lambda item: item[1])
    if p.idle > share:
        return (
            f"limited by idle workers: they wait {p.idle:.0%} of a step for each other; use fewer "
            "GPUs, or smaller batches"
        )
    return f"limited by {TASKS[phase]}: {share:.0%} of a step; to shorten it, use {REMEDIES[phase]}"


def _explained(option: Option) -> list[str]:
    p = option.prediction
    rows = sorted(p.shares.items(), key=lambda item: -item[1])
    lines = ["a step of the average worker:"]
    for phase, share in rows:
        lines.append(f"  {p.step * share:>8.2f} s  {share:>4.0%}  {TASKS[phase]}")
    lines.append(f"  {p.step * p.idle:>8.2f} s  {p.idle:>4.0%}  idle")
    if p.waiting:
        lines.append(f"  including {p.step * p.waiting:.2f} s of waiting for the last scores")
    return [*lines, f"an evaluation takes {p.evaluation:.1f} s"]

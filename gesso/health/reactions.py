"""Reactions of a run to its warnings. Like the warnings, they are a function of the rows, so that a
resumed run has reacted to the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gesso.config.schema import Reaction
from gesso.health.rows import Row
from gesso.types import Scales

LOWER_LR = 0.5
RAISE_KL = 2.0


def rescaled(scales: Scales, reactions: Sequence[Reaction]) -> Scales:
    for reaction in reactions:
        if reaction == "lower_lr":
            scales = replace(scales, lr=scales.lr * LOWER_LR)
        elif reaction == "raise_kl":
            scales = replace(scales, kl=scales.kl * RAISE_KL)
    return scales


def described(reaction: Reaction, scales: Scales) -> str:
    return {
        "stop": "the run is saved and stops",
        "lower_lr": f"from the next step on, optimizer.lr is multiplied by {scales.lr:g}",
        "raise_kl": f"from the next step on, the weight of the KL is multiplied by {scales.kl:g}",
    }[reaction]


def best_step(rows: Sequence[Row]) -> int | None:
    """The first step with the highest held-out reward."""
    evaluated = [row for row in rows if row.get("eval/reward") is not None]
    return max(evaluated, key=lambda row: row["eval/reward"])["step"] if evaluated else None

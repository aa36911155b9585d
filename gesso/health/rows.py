"""Facts about a run, and statistics of its rows: medians, plateaus."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance
from typing import TYPE_CHECKING, Any

from gesso.config import Recipe

if TYPE_CHECKING:
    from gesso.algorithms.base import Algorithm

Row = Mapping[str, Any]

WINDOW = 5  # rows of which the median is used, since single steps are noisy
SPAN = 10  # rows of which the mean reward is compared with that of the rows before
ERRORS = 2.0  # standard errors that a difference must exceed
SATURATED = 0.75  # share of samples at the best reward above which most flat groups are at the top


@dataclass(frozen=True)
class Facts:
    """Facts about a run that its rows do not contain."""

    clip: float | None  # half the width of the ratio's range; None without a ratio
    updates: int  # optimizer steps per row
    dtype: str
    held_out: int  # prompts per evaluation
    watched: tuple[str, ...] = ("eval/reward",)  # metrics that should rise
    separate_eval: bool = False  # evaluations have separate rewards
    compares: bool = True  # advantages compare samples of the same prompt
    groups: int = 1  # prompts per step
    max_tokens: int | None = None  # per response; None for image models

    @property
    def is_language(self) -> bool:
        return self.max_tokens is not None

    @property
    def clip_name(self) -> str:
        return "clip in algorithm.surrogate" if self.is_language else "algorithm.clip"

    @staticmethod
    def of(recipe: Recipe, algorithm: Algorithm, held_out: int) -> Facts:
        """Watches the total, every reward with a weight of at least 0 (0: monitored only), and its
        share of exact answers. Other details of a reward need not rise."""
        entries = recipe.eval_reward or recipe.reward
        parts = [f"eval/{entry.label}" for entry in entries if entry.weight >= 0]
        return Facts(
            algorithm.clip_range,
            algorithm.updates * algorithm.epochs,
            recipe.model.dtype,
            held_out,
            watched=("eval/reward", *parts, *(f"{part}/exact" for part in parts)),
            separate_eval=bool(recipe.eval_reward),
            compares=algorithm.advantage.compares,
            groups=recipe.data.groups,
            max_tokens=algorithm.spec(0, 0, recipe.model).max_tokens,
        )


def recent(rows: Sequence[Row], key: str) -> list[float]:
    """Values of the last WINDOW rows; empty unless every row has one."""
    values = [v for row in rows[-WINDOW:] if (v := row.get(key)) is not None]
    return values if len(values) == WINDOW else []


def then_and_now(rows: Sequence[Row], key: str) -> tuple[float | None, float | None]:
    """Medians of the first and of the last rows; None without values, or if they overlap."""
    then = [v for row in rows[: WINDOW + 1] if (v := row.get(key)) is not None]
    now = recent(rows[WINDOW + 1 :], key)
    return median(then) if then else None, median(now) if now else None


def flat_shares(rows: Sequence[Row], facts: Facts) -> list[float]:
    """Shares of flat groups in the last rows, among all sampled groups, including flat ones that
    were replaced."""
    flat = recent(rows, "advantage/flat_groups")
    refilled = [row.get("refilled") or 0.0 for row in rows[-WINDOW:]]
    pairs = zip(flat, refilled, strict=False)
    return [(share * facts.groups + n) / (facts.groups + n) for share, n in pairs]


def plateau(rows: Sequence[Row]) -> Sequence[Row]:
    """The newest rows over which the reward did not rise by more than noise: as many blocks of SPAN
    as possible, at least two. Empty otherwise, or if most samples have the best reward."""
    scored = [row for row in rows if row.get("reward") is not None]
    now = [row["reward"] for row in scored[-SPAN:]]
    start = len(scored) - SPAN
    while start >= SPAN:
        block = [row["reward"] for row in scored[start - SPAN : start]]
        noise = math.sqrt((variance(now) + variance(block)) / SPAN)
        if fmean(now) - fmean(block) > ERRORS * noise:
            break
        start -= SPAN
    tops = recent(rows, "reward/at_max")
    if len(scored) - start < 2 * SPAN or not tops or median(tops) >= SATURATED:
        return []
    return scored[start:]


def stalled(rows: Sequence[Row]) -> str | None:
    """A description of the plateau, for messages."""
    same = plateau(rows)
    reward = fmean(row["reward"] for row in same[-SPAN:]) if same else None
    return f"while the reward has not risen for {len(same)} steps ({reward:.3g})" if same else None


def replayed(row: Row) -> tuple[float | None, float | None]:
    """Largest and mean |Δ log-prob| between sampling and replay, the mean over all optimizer steps.
    With `algorithm.importance` ratios use the learner's log-probs, and the importance weights
    contain the difference."""
    if row.get("update/sampler_gap") is not None:
        return row.get("update/sampler_gap_max"), row["update/sampler_gap"]
    return row.get("update/first_abs_dlogp_max"), row.get("update/abs_dlogp")


def floor(row: Row) -> float | None:
    """Largest |Δ log-prob| under the same weights; None unless the row was on-policy."""
    return row.get("update/first_abs_dlogp_max") if row.get("age") == 0 else None

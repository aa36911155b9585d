"""Is the run well? Warnings in plain words, from nothing but the rows of metrics.jsonl.

Every kind of warning is a pure function over the rows so far: a sentence (what was seen, what it
means, what to do), or None. `Health` is fed the rows one by one and says which sentences are new;
fed the rows of a run folder again, it is where it was, so that a resumed run warns as an
undisturbed one. docs/health.md explains every kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from gesso.config import Recipe

Row = Mapping[str, Any]

WINDOW = 5  # rows whose median is judged: one noisy step says nothing
AWAY = 20  # rows a warning must have been gone for before it is told again
FLAT = 0.5  # of the groups: beyond it most of the sampling is for nothing
SATURATED = 0.75  # of the samples at the best reward: then of the flat groups most are at the top
# PPO's clip is one-sided: it cuts terms that left the range in the direction of their advantage.
# Of terms carried out of it by an update on other samples that is about half: at a share of .25
# half of them are out, at .5 all. Measured on the demo, whose clip is 1e-4, one run each: .38 at
# lag 1, held-out reward .65 → .67 in 20 steps where lag 0 gives .93; .37 in the second optimizer
# step of updates = 2, reward .67 in steps 6 to 8 where updates = 1 gives .77.
OLD = 0.25  # at the first optimizer step, where each term cut is one sampled for nothing
CLIPPED = 0.35  # after it, where some clipping is meant
COLLAPSED = 0.3  # of the distance at the start; the demo keeps .75 and learns well
EVALS = 4  # evaluations compared, the later half with the earlier
ERRORS = 2.0  # standard errors of an evaluation that a fall must exceed
GIVEN_BACK = 0.25  # of all the range a held-out figure ever had, that a fall must exceed

DISAGREE = {"float32": 0.01, "float16": 0.01, "bfloat16": 0.1}
"""Δ log-prob beyond any rounding: sampling and replay are not the same policy.

An error of e in the step's mean, in units of its noise, moves the log-prob (a mean over D elements)
by about e/√D + e²/2. A generous e is 30 · epsilon: ten for guidance, three for roundings that fall
otherwise because kernels choose another order for another batch. With D = 1000 that is 1e-3 for
float16, and for float32 where a GPU rounds to TF32, and 0.03 for bfloat16. Measured in float32 on a
CPU: up to 2.4e-7."""


@dataclass(frozen=True)
class Symptom:
    kind: str
    text: str


@dataclass(frozen=True)
class Facts:
    """What the rows do not say of their run."""

    clip: float | None  # half the width of the ratio's range; None without a ratio
    updates: int  # optimizer steps a row
    dtype: str
    held_out: int  # prompts of an evaluation
    watched: tuple[str, ...] = ("eval/reward",)  # figures that are meant to rise

    @staticmethod
    def of(recipe: Recipe, clip: float | None, updates: int, held_out: int) -> Facts:
        """Watched are the total, every reward that does not count against it (a weight of 0 is one
        that is only looked at), and its share of exact answers. What another detail of a reward
        should do, nobody has said."""
        parts = [f"eval/{entry.name}" for entry in recipe.reward if entry.weight >= 0]
        watched = ("eval/reward", *parts, *(f"{part}/exact" for part in parts))
        return Facts(clip, updates, recipe.model.dtype, held_out, watched)


def clip_under_floor(rows: Sequence[Row], facts: Facts) -> str | None:
    """On-policy, before the first optimizer step, the ratio is 1 but for rounding."""
    gap = _floor(rows[-1])
    if facts.clip is None or gap is None or gap <= facts.clip or ratio_not_one(rows, facts):
        return None
    return under_floor(facts.clip, gap)


def under_floor(clip: float, gap: float) -> str:
    return (
        f"algorithm.clip = {clip:g} lies under the noise floor of the ratio, {gap:.1e}: "
        "rounding alone clips; raise clip or use float32"
    )


def ratio_not_one(rows: Sequence[Row], facts: Facts) -> str | None:
    gap = _floor(rows[-1])
    if gap is None or gap <= DISAGREE[facts.dtype]:
        return None
    return (
        f"sampled and scored again with the same weights, log-probs differ by up to {gap:.2g}, "
        f"which is no rounding in {facts.dtype}: the ratio is not 1 where it must be; look for "
        "dropout, a model or step rule that answers differently the second time, or weights that "
        "did not reach the sampler"
    )


def saturated(rows: Sequence[Row], facts: Facts) -> str | None:
    """Most groups are flat, at the largest reward of the run. A reward that never differed has no
    top: that is `flat_groups`."""
    flat = recent(rows, "advantage/flat_groups")
    shares, tops = recent(rows, "reward/at_max"), recent(rows, "reward/max")
    if not flat or not shares or median(flat) <= FLAT or median(shares) < SATURATED:
        return None
    best = max(top for row in rows if (top := row.get("reward/max")) is not None)
    if min(tops) < best or not any(row.get("reward/std") for row in rows):
        return None
    return (
        f"{median(shares):.0%} of the samples have the largest reward of the run, {best:.3g}, and "
        f"in {median(flat):.0%} of the groups all have the same: it has little left to teach; stop "
        "here, or take harder prompts or a stricter reward"
    )


def flat_groups(rows: Sequence[Row], facts: Facts) -> str | None:
    shares = recent(rows, "advantage/flat_groups")
    if not shares or median(shares) <= FLAT or saturated(rows, facts):
        return None
    return (
        f"in {median(shares):.0%} of the groups all samples scored the same (the last {WINDOW} "
        "steps): such prompts teach nothing; use a reward with finer steps, prompts that succeed "
        "now and then, a larger algorithm.group or more noise"
    )


def old_samples(rows: Sequence[Row], facts: Facts) -> str | None:
    """At lag 1 terms can be out of the clip's range before the first optimizer step."""
    ages, shares = recent(rows, "age"), recent(rows, "update/clipped")
    gaps = recent(rows, "update/abs_dlogp")
    if not ages or not shares or not gaps or min(ages) < 1 or median(shares) <= OLD:
        return None
    return (
        f"samples are {max(ages):g} update old and {median(shares):.0%} of their terms are clipped "
        f"away, log-probs having moved by {median(gaps):.1e} since: they are too old for steps of "
        "this size; use lag = 0, a lower optimizer.lr or a wider algorithm.clip"
    )


def clipping_most(rows: Sequence[Row], facts: Facts) -> str | None:
    """On-policy the first optimizer step cannot clip; the share is that of the others."""
    ages, shares = recent(rows, "age"), recent(rows, "update/clipped")
    if facts.updates < 2 or not ages or not shares or max(ages) > 0:
        return None
    share = median(shares) * facts.updates / (facts.updates - 1)
    if share <= CLIPPED:
        return None
    return (
        f"after the first of {facts.updates} optimizer steps {min(share, 1):.0%} of the terms are "
        "clipped away: one step already leaves the clip's range; lower optimizer.lr, widen "
        "algorithm.clip, or save the time with algorithm.updates = 1"
    )


def diversity(rows: Sequence[Row], facts: Facts) -> str | None:
    first = [d for row in rows[: WINDOW + 1] if (d := row.get("diversity")) is not None]
    now = recent(rows[WINDOW + 1 :], "diversity")
    if not first or not now or median(now) >= COLLAPSED * median(first):
        return None
    return (
        f"samples of one prompt lie {median(now):.3g} apart, {median(now) / median(first):.0%} of "
        f"the {median(first):.3g} at the start: the model draws one picture over and over; take "
        "fewer steps, a lower optimizer.lr or more weight on the KL"
    )


def reward_hacking(rows: Sequence[Row], facts: Facts) -> str | None:
    """Over the last four evaluations the training reward rose, and a held-out figure lies lower in
    both of the later two than in both of the earlier, by clearly more than noise."""
    evals = [i for i, row in enumerate(rows) if row.get("eval/reward") is not None]
    last = evals[-EVALS:]
    between = [
        [r for row in rows[a + 1 : b + 1] if (r := row.get("reward")) is not None]
        for a, b in pairwise(last)
    ]
    if len(last) < EVALS or not all(between):
        return None
    trained = [fmean(rewards) for rewards in between]
    stds = [s for row in rows[last[0] :] if (s := row.get("reward/std")) is not None]
    error = median(stds) / math.sqrt(facts.held_out)
    rising = trained[0] == min(trained) and trained[-1] == max(trained)
    if not rising or trained[-1] - trained[0] <= error:
        return None
    for figure in facts.watched:
        values = [v for i in evals if (v := rows[i].get(figure)) is not None]
        if len(values) < len(evals):
            continue
        early, late = values[-EVALS : -EVALS // 2], values[-EVALS // 2 :]
        before, now = fmean(early), fmean(late)
        noise = error if figure == "eval/reward" else _error_of_share(values, facts.held_out)
        margin = max(ERRORS * noise, GIVEN_BACK * (max(values) - min(values)))
        if max(late) < min(early) and before - now > margin:
            return (
                f"since step {rows[last[0]]['step']} the training reward rose from "
                f"{trained[0]:.3g} to {trained[-1]:.3g} while held-out {figure} fell from "
                f"{before:.3g} to {now:.3g}: the model pleases the reward in a way that does not "
                "carry over; look at the pictures in report.html, go back to an earlier step, or "
                "reward what was lost"
            )
    return None


CHECKS: dict[str, Callable[[Sequence[Row], Facts], str | None]] = {
    "clip-under-floor": clip_under_floor,
    "ratio-not-one": ratio_not_one,
    "flat-groups": flat_groups,
    "saturated": saturated,
    "old-samples": old_samples,
    "clipping-most": clipping_most,
    "diversity": diversity,
    "reward-hacking": reward_hacking,
}


class Health:
    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.active: list[str] = []  # kinds that hold at the newest row
        self._rows: list[Row] = []
        self._seen: dict[str, int] = {}  # kind → number of the latest row at which it held

    def feed(self, row: Row) -> list[Symptom]:
        """The warnings that are new with this row, as written to metrics.jsonl."""
        self._rows.append(row)
        now = len(self._rows)
        found = [
            Symptom(kind, text)
            for kind, check in CHECKS.items()
            if (text := check(self._rows, self.facts)) is not None
        ]
        new = [s for s in found if s.kind not in self._seen or now - self._seen[s.kind] > AWAY]
        self._seen |= {symptom.kind: now for symptom in found}
        self.active = [symptom.kind for symptom in found]
        return new


@dataclass(frozen=True)
class SelfTest:
    text: str
    broken: bool  # training on it would be worthless


def self_test(row: Row, facts: Facts) -> SelfTest | None:
    """The verdict of a sitting's first on-policy update; None where it says nothing of log-probs.

    `first_abs_dlogp_max` is taken before any optimizer step; the mean is over all of them, yet a
    policy that has merely moved leaves the first small. Broken is what is large in both.
    """
    gap, mean = row.get("update/first_abs_dlogp_max"), row.get("update/abs_dlogp")
    if gap is None or mean is None or not math.isfinite(gap + mean):
        return None
    limit = DISAGREE[facts.dtype]
    if min(gap, mean) > limit:
        text = (
            "sampling and replay disagree: log-probs of the same steps under the same weights "
            f"differ by {mean:.2g} on average and up to {gap:.2g} where {facts.dtype} explains at "
            f"most {limit:g}, so the ratio is not 1 and training on it is worthless; nothing of "
            "it was saved; look for dropout, a model or step rule that answers differently the "
            "second time, or weights that did not reach the sampler"
        )
        return SelfTest(text, broken=True)
    over = facts.clip is not None and gap > facts.clip
    verdict = "that is too much" if over else "fine"
    clip = f", clip {facts.clip:g}" if facts.clip is not None else ""
    return SelfTest(
        f"self-test: replay differs from sampling by at most {gap:.1e}{clip}: {verdict}",
        broken=False,
    )


def recent(rows: Sequence[Row], key: str) -> list[float]:
    """Values of the last WINDOW rows; empty unless each has one."""
    values = [v for row in rows[-WINDOW:] if (v := row.get(key)) is not None]
    return values if len(values) == WINDOW else []


def _floor(row: Row) -> float | None:
    """Largest |Δ log-prob| under the same weights, of a row that was on-policy."""
    return row.get("update/first_abs_dlogp_max") if row.get("age") == 0 else None


def _error_of_share(values: Sequence[float], n: int) -> float:
    """Standard error of an evaluation's mean whose n values lie in 0 … 1: sqrt(p(1−p)/n) at most.
    0 for another figure, whose spread no row tells."""
    if min(values) < 0 or max(values) > 1:
        return 0.0
    return max(math.sqrt(p * (1 - p) / n) for p in values[-EVALS:])

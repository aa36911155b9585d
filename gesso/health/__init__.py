"""Warnings about a run, computed only from the rows of metrics.jsonl.

Every kind of warning is a pure function of the rows so far: a sentence (observation, likely cause,
remedy), or None. `Health` takes the rows one by one and returns the new warnings. Replaying the
rows of a run folder restores its state, so that a resumed run warns like an uninterrupted one.
docs/reference/health.md explains every kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from gesso.cluster.speeds import SLOW
from gesso.health.language import (
    constant_length,
    entropy_collapse,
    kl_explodes,
    longer_responses,
    truncated_responses,
)
from gesso.health.ratio import (
    clip_under_floor,
    ratio_not_one,
    sampler_mismatch,
    self_test,
    under_floor,
)
from gesso.health.rows import (
    ERRORS,
    SATURATED,
    WINDOW,
    Facts,
    Row,
    flat_shares,
    recent,
    stalled,
    then_and_now,
)

__all__ = ["CHECKS", "SERIOUS", "Facts", "Health", "Symptom", "self_test", "under_floor"]

REPEAT_AFTER = 20  # rows without a warning before it is reported again
FLAT = 0.5  # share of flat groups above which most samples have no signal
TOP = 0.95  # share of samples at the best reward, if samples of one prompt are not compared
# PPO's clip is one-sided: it drops terms that left the range in the direction of their advantage,
# about half of those that an update on other samples moved out of the range. At a share of .25 half
# of all terms are outside, at .5 all. Measured on the demo with a clip of 1e-4, one run each: .38
# at lag 1, held-out reward .65 → .67 in 20 steps where lag 0 reaches .93; .37 in the second
# optimizer step of updates = 2, reward .67 in steps 6 to 8 where updates = 1 reaches .77.
OLD = 0.25  # share at the first optimizer step, where each clipped term is a wasted sample
CLIPPED = 0.35  # share after the first optimizer step, where some clipping is intended
COLLAPSED = 0.3  # share of the diversity at the start; the demo keeps .75 and learns well
EVALS = 4  # evaluations: the later half is compared with the earlier half
IDLE = 0.2  # share of the time in which a worker is idle
MIN_DROP = 0.25  # share of the range of a held-out metric that a drop must exceed


@dataclass(frozen=True)
class Symptom:
    kind: str
    text: str


def saturated(rows: Sequence[Row], facts: Facts) -> str | None:
    """Most samples have the largest reward of the run, and more than half of the groups are flat at
    it. A reward that never varied is reported by `flat-groups` instead; groups are ignored if the
    algorithm does not compare samples of one prompt."""
    flat = flat_shares(rows, facts)
    shares, tops = recent(rows, "reward/at_max"), recent(rows, "reward/max")
    if not flat or not shares or median(shares) < (SATURATED if facts.compares else TOP):
        return None
    if facts.compares and median(flat) <= FLAT:
        return None
    best = max(top for row in rows if (top := row.get("reward/max")) is not None)
    if min(tops) < best or not any(row.get("reward/std") for row in rows):
        return None
    equal = f", and in {median(flat):.0%} of the groups all rewards are equal" * facts.compares
    return (
        f"{median(shares):.0%} of the samples have the largest reward of the run, {best:.3g}"
        f"{equal}: the reward is saturated and gives little signal; stop the run, or use harder "
        "prompts or a stricter reward"
    )


def flat_groups(rows: Sequence[Row], facts: Facts) -> str | None:
    """In more than half of the groups all samples have the same reward."""
    shares = flat_shares(rows, facts)
    if not facts.compares or not shares or median(shares) <= FLAT or saturated(rows, facts):
        return None
    more = "a higher algorithm.temperature" if facts.is_language else "more sampling noise"
    return (
        f"in {median(shares):.0%} of the groups all samples have the same reward (median of the "
        f"last {WINDOW} steps): such groups have zero advantages and no policy gradient; use a "
        "finer-grained reward, prompts that the model solves only sometimes, a larger "
        f"algorithm.group or {more}"
    )


def old_samples(rows: Sequence[Row], facts: Facts) -> str | None:
    """With `lag`, more than 25% of the terms are clipped. Terms can then be outside the clip
    range before the first optimizer step."""
    ages, shares = recent(rows, "age"), recent(rows, "update/clipped")
    gaps = recent(rows, "update/abs_dlogp")
    if not ages or not shares or not gaps or min(ages) < 1 or median(shares) <= OLD:
        return None
    old = "1 update" if max(ages) == 1 else f"{max(ages):g} updates"
    return (
        f"samples are {old} old and {median(shares):.0%} of their terms are "
        f"clipped; their log-probs have changed by {median(gaps):.1e} on average since sampling: "
        "the samples are too off-policy for updates of this size; use lag = 0, a lower "
        f"optimizer.lr or a wider {facts.clip_name}"
    )


def clipping_most(rows: Sequence[Row], facts: Facts) -> str | None:
    """After the first optimizer step of an on-policy batch, more than 35% of the terms are clipped.
    The first step itself cannot clip."""
    ages, shares = recent(rows, "age"), recent(rows, "update/clipped")
    # Without a ratio to the sampling policy (DGPO: to an average), the first step can clip, too.
    if facts.clip is None or facts.updates < 2 or not ages or not shares or max(ages) > 0:
        return None
    share = median(shares) * facts.updates / (facts.updates - 1)
    if share <= CLIPPED:
        return None
    return (
        f"after the first of {facts.updates} optimizer steps, {min(share, 1):.0%} of the terms are "
        "clipped: a single optimizer step moves the policy out of the clip range; lower "
        f"optimizer.lr, use a wider {facts.clip_name}, or set algorithm.updates = 1 to save the "
        "ineffective steps"
    )


def diversity(rows: Sequence[Row], facts: Facts) -> str | None:
    """Diversity fell below 30% of its initial value. For language models the reward must have
    stopped rising as well: the share of distinct responses also falls when a model becomes
    confident of the right answer."""
    then, now = then_and_now(rows, "diversity")
    if then is None or now is None or now >= COLLAPSED * then:
        return None
    if facts.is_language:
        since = stalled(rows)
        return since and (
            f"{now:.0%} of the responses to one prompt are distinct, compared with {then:.0%} at "
            f"the start, {since}: the model is collapsing to one response per prompt; use a higher "
            "algorithm.temperature, a lower optimizer.lr or a KL penalty (algorithm.kl)"
        )
    return (
        f"the mean distance between samples of one prompt is {now:.3g}, {now / then:.0%} of the "
        f"{then:.3g} at the start: the model is collapsing to one image per prompt; train for "
        "fewer steps, or use a lower optimizer.lr or a larger KL weight"
    )


def reward_hacking(rows: Sequence[Row], facts: Facts) -> str | None:
    """Over the last four evaluations the training reward did not fall, and a held-out metric is
    lower in both of the later two than in both of the earlier two, by clearly more than noise."""
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
    if min(trained) < trained[0] - error:
        return None
    rose = trained[-1] > trained[0] + error
    course = f"rose from {trained[0]:.3g} to" if rose else "stayed at"
    for metric in facts.watched:
        values = [v for i in evals if (v := rows[i].get(metric)) is not None]
        if len(values) < len(evals):
            continue
        early, late = values[-EVALS : -EVALS // 2], values[-EVALS // 2 :]
        before, now = fmean(early), fmean(late)
        total = metric == "eval/reward" and not facts.separate_eval
        noise = error if total else _error_of_share(values, facts.held_out)
        margin = max(ERRORS * noise, MIN_DROP * (max(values) - min(values)))
        if max(late) < min(early) and before - now > margin:
            return (
                f"since step {rows[last[0]]['step']} the training reward {course} "
                f"{trained[-1]:.3g} while held-out {metric} fell from "
                f"{before:.3g} to {now:.3g}: the model exploits the reward without generalising; "
                f"inspect the {'responses' if facts.is_language else 'images'} in report.html, "
                "go back to an earlier step, or add a reward for what got worse"
            )
    return None


def idle_workers(rows: Sequence[Row], facts: Facts) -> str | None:
    """Workers are idle for more than 20% of the time of sampling and updates."""
    shares = recent(rows, "cluster/idle")
    if not shares or median(shares) <= IDLE:
        return None
    micro = "learner.micro_tokens" if facts.is_language else "learner.micro_batch"
    if "cluster/weights_gb" in rows[-1]:
        overlap = "" if any(recent(rows, "age")) else "set lag = 1, or "
        return (
            f"workers are idle for {median(shares):.0%} of the time (median of the last {WINDOW} "
            f"steps): samplers and learners wait for each other; {overlap}move devices between "
            "cluster.samplers and cluster.workers (`gesso timeline` suggests numbers)"
        )
    return (
        f"workers are idle for {median(shares):.0%} of the time of sampling and updates (median of "
        f"the last {WINDOW} steps): the parts of a batch do not divide evenly; lower sampler.batch "
        f"or {micro} for more parts, or use more prompts per step (data.groups) or fewer workers"
    )


def slow_worker(rows: Sequence[Row], facts: Facts) -> str | None:
    """A worker takes more than three times as long for a sample as the others."""
    ratios, ranks = recent(rows, "cluster/slowest"), recent(rows, "cluster/slowest_rank")
    if not ratios or median(ratios) < SLOW or len(set(ranks)) > 1:
        return None
    return (
        f"worker {ranks[0]:.0f} took {median(ratios):.1f} times as long per sample as the others "
        f"in the last {WINDOW} steps, so it gets less work: look for other programs on its device, "
        "or for a slower device or node; without this worker a step may be faster"
    )


CHECKS: dict[str, Callable[[Sequence[Row], Facts], str | None]] = {
    "clip-under-floor": clip_under_floor,
    "ratio-not-one": ratio_not_one,
    "flat-groups": flat_groups,
    "saturated": saturated,
    "old-samples": old_samples,
    "clipping-most": clipping_most,
    "diversity": diversity,
    "reward-hacking": reward_hacking,
    "truncated-responses": truncated_responses,
    "longer-responses": longer_responses,
    "entropy-collapse": entropy_collapse,
    "constant-length": constant_length,
    "kl-explodes": kl_explodes,
    "sampler-mismatch": sampler_mismatch,
    "idle-workers": idle_workers,
    "slow-worker": slow_worker,
}

# Kinds that mean that the metrics of a run are misleading, or that the run is failing.
SERIOUS = frozenset(
    {"ratio-not-one", "sampler-mismatch", "reward-hacking", "entropy-collapse", "kl-explodes"}
)


class Health:
    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.active: list[str] = []  # kinds that apply to the newest row
        self.rows: list[Row] = []
        self._seen: dict[str, int] = {}  # kind → number of the latest row that it applied to

    def feed(self, row: Row) -> list[Symptom]:
        """Adds a row of metrics.jsonl and returns its new warnings."""
        self.rows.append(row)
        now = len(self.rows)
        symptoms = [
            Symptom(kind, text)
            for kind, check in CHECKS.items()
            if (text := check(self.rows, self.facts)) is not None
        ]
        new = [
            s
            for s in symptoms
            if s.kind not in self._seen or now - self._seen[s.kind] > REPEAT_AFTER
        ]
        self._seen |= {symptom.kind: now for symptom in symptoms}
        self.active = [symptom.kind for symptom in symptoms]
        return new


def _error_of_share(values: Sequence[float], n: int) -> float:
    """Upper bound of the standard error of an evaluation's mean over n values in [0, 1]:
    sqrt(p(1−p)/n). 0 for other metrics, whose spread is not in the rows."""
    if min(values) < 0 or max(values) > 1:
        return 0.0
    return max(math.sqrt(p * (1 - p) / n) for p in values[-EVALS:])

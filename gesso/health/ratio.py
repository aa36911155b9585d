"""Checks that sampling and training use the same policy: the ratio must be 1 before the first
optimizer step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gesso.health.rows import Facts, Row, floor, recent

FLOORED = 0.02  # of the tokens clipped before the first optimizer step, by rounding alone
# An importance cap of 2 acts on tokens that are more than twice as likely under the learner as
# under the sampler. In bfloat16 a few of 1e5 tokens are, so the mean must be off as well. Measured
# on the bundled model on a CPU: .03 and 4e-5 in bfloat16, 6e-6 and 1e-7 in float32.
TWICE, OFTEN = math.log(2), 0.02
LOST = 0.9  # mean of the importance weights; 1 if the cap truncates none

DISAGREE = {"float32": 0.01, "float16": 0.01, "bfloat16": 0.1}
"""Δ log-prob that rounding cannot explain: sampling and replay are not the same policy.

An error of e in the step's mean, in units of its noise, moves the log-prob (a mean over D elements)
by about e/√D + e²/2. A generous e is 30 · epsilon: ten for guidance, three for kernels that sum in
another order for another batch. With D = 1000 that is 1e-3 for
float16, and for float32 where a GPU rounds to TF32, and 0.03 for bfloat16. Measured in float32 on a
CPU: up to 2.4e-7.

A token's log-prob is not a mean over many elements, and that of a rare token may be far off: for
language models the mean over the tokens must stay below this limit."""


def clip_under_floor(rows: Sequence[Row], facts: Facts) -> str | None:
    """On-policy, before the first optimizer step, the ratio is 1 except for rounding."""
    gap = floor(rows[-1])
    if facts.clip is None or gap is None or ratio_not_one(rows, facts):
        return None
    if not facts.writes:
        return under_floor(facts.clip, gap) if gap > facts.clip else None
    share = rows[-1].get("update/first_clipped")
    if share is None or share <= FLOORED:
        return None
    return (
        f"before the first optimizer step, where every ratio is 1 but for rounding, {share:.0%} of "
        f"the tokens are clipped (log-probs differ by up to {gap:.1e}): rounding decides which "
        "count; use a wider clip in algorithm.surrogate, importance_cap = 2 or float32"
    )


def under_floor(clip: float, gap: float) -> str:
    return (
        f"algorithm.clip = {clip:g} lies under the noise floor of the ratio, {gap:.1e}: "
        "rounding alone clips; raise clip or use float32"
    )


def ratio_not_one(rows: Sequence[Row], facts: Facts) -> str | None:
    gap, mean = floor(rows[-1]), rows[-1].get("update/abs_dlogp")
    if facts.writes and gap is not None and mean is not None:
        gap = min(gap, mean)  # a rare token may differ much; see `sampler_mismatch`
    if gap is None or gap <= DISAGREE[facts.dtype]:
        return None
    return (
        f"sampled and scored again with the same weights, log-probs differ by "
        f"{'' if facts.writes else 'up to '}{gap:.2g}{' on average' * facts.writes}, "
        f"which is no rounding in {facts.dtype}: the ratio is not 1 where it must be; look for "
        "dropout, a model or step rule that answers differently the second time, or weights that "
        "did not reach the sampler"
    )


def sampler_mismatch(rows: Sequence[Row], facts: Facts) -> str | None:
    """Log-probs of sampling and training differ too much for a ratio, but not by more than rounding
    explains. With importance_cap the ratio uses the learner's log-probs and the difference is in
    the importance weights."""
    ages, weights = recent(rows, "age"), recent(rows, "update/importance")
    if not facts.writes or not ages or max(ages) > 0 or ratio_not_one(rows, facts):
        return None
    if weights and median(weights) < LOST:
        return (
            f"the importance weights of tokens are {median(weights):.2f} on average where 1 is "
            "none lost: sampler and learner differ so much that algorithm.importance_cap cuts "
            "much away; use a higher cap, or one dtype and engine for both"
        )
    gaps = recent(rows, "update/first_abs_dlogp_max")
    means = recent(rows, "update/abs_dlogp")
    if not gaps or not means or median(gaps) <= TWICE or median(means) <= OFTEN:
        return None
    return (
        f"under the same weights sampler and learner give a token log-probs that differ by "
        f"{median(means):.2g} on average and up to {median(gaps):.2g}: every ratio carries that; "
        'set algorithm.importance_cap = 2, or model.dtype = "float32"'
    )


@dataclass(frozen=True)
class SelfTest:
    text: str
    broken: bool  # training would be worthless


def self_test(row: Row, facts: Facts) -> SelfTest | None:
    """The verdict on a process's first on-policy update; None if its row has no log-probs.

    `first_abs_dlogp_max` is taken before any optimizer step, the mean over all of them. If the
    policy has merely changed, only the mean is large; if it is broken, both are.
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
    clip = f", clip {facts.clip:g}" if facts.clip is not None else ""
    if facts.writes:  # among many tokens one may be far off
        share = row["update/first_clipped"]
        over, clip = share > FLOORED, f", {share:.0%} clipped"
    verdict = "that is too much" if over else "fine"
    return SelfTest(
        f"self-test: replay differs from sampling by at most {gap:.1e}{clip}: {verdict}",
        broken=False,
    )

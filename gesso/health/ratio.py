"""Checks that sampling and training use the same policy: the ratio must be 1 before the first
optimizer step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gesso.health.rows import Facts, Row, floor, recent, replayed

FLOORED = 0.02  # share of tokens clipped before the first optimizer step, by rounding alone
# A cap of 2 affects tokens that are more than twice as likely under the learner as
# under the sampler. In bfloat16 a few of 1e5 tokens are, so the mean must be large as well.
# Measured on the bundled model on a CPU: .03 and 4e-5 in bfloat16, 6e-6 and 1e-7 in float32.
TWICE, OFTEN = math.log(2), 0.02
LOST = 0.9  # mean of the importance weights; 1 if none is truncated or masked

CORRECT = 'algorithm.importance.kind = "token-truncate"'

DISAGREE = {"float32": 0.01, "float16": 0.01, "bfloat16": 0.1}
"""Δ log-prob that rounding cannot explain: sampling and replay use different policies.

An error of e in the mean of a step, in units of its noise, changes the log-prob (a mean over D
elements) by about e/√D + e²/2. A generous e is 30 · epsilon: a factor of ten for guidance, three
for kernels that sum in a different order for a different batch size. With D = 1000 that is 1e-3 for
float16, and for float32 on a GPU that rounds to TF32, and 0.03 for bfloat16. Measured in float32 on
a CPU: up to 2.4e-7.

The log-prob of a token is not a mean over many elements, and that of a rare token can be far off:
for language models the mean over the tokens must stay below this limit."""


def clip_under_floor(rows: Sequence[Row], facts: Facts) -> str | None:
    """Rounding alone leads to clipping: on-policy, before the first optimizer step, the ratio is 1
    except for rounding."""
    gap = floor(rows[-1])
    if facts.clip is None or gap is None or ratio_not_one(rows, facts):
        return None
    if not facts.is_language:
        return under_floor(facts.clip, gap) if gap > facts.clip else None
    share = rows[-1].get("update/first_clipped")
    if share is None or share <= FLOORED:
        return None
    return (
        f"before the first optimizer step, where every ratio is 1 except for rounding, "
        f"{share:.0%} of the tokens are clipped (log-probs differ by up to {gap:.1e}): rounding "
        "errors decide which tokens are clipped; use a wider clip in algorithm.surrogate, "
        f'{CORRECT} or model.dtype = "float32"'
    )


def under_floor(clip: float, gap: float) -> str:
    return (
        f"algorithm.clip = {clip:g} is below the noise floor of the ratio, {gap:.1e}: rounding "
        'errors alone cause clipping; raise algorithm.clip or use model.dtype = "float32"'
    )


def ratio_not_one(rows: Sequence[Row], facts: Facts) -> str | None:
    """Log-probs of sampling and replay with the same weights differ by more than rounding."""
    gap, mean = replayed(rows[-1])
    if rows[-1].get("age") != 0:
        return None
    if facts.is_language and gap is not None and mean is not None:
        gap = min(gap, mean)  # a rare token can differ a lot; see `sampler_mismatch`
    if gap is None or gap <= DISAGREE[facts.dtype]:
        return None
    size = f"{gap:.2g} on average" if facts.is_language else f"up to {gap:.2g}"
    return (
        f"log-probs of sampling and replay with the same weights differ by {size}, more than "
        f"rounding in {facts.dtype} explains: the ratio is not 1 where it must be; look for "
        "dropout, a model or step rule that returns different results on replay, or weights that "
        "did not reach the sampler"
    )


def sampler_mismatch(rows: Sequence[Row], facts: Facts) -> str | None:
    """Log-probs of sampling and training differ too much for a useful ratio, but not by more than
    rounding explains. With `importance`, the weights contain the difference, not the ratio."""
    ages, weights = recent(rows, "age"), recent(rows, "update/importance")
    if not facts.is_language or not ages or max(ages) > 0 or ratio_not_one(rows, facts):
        return None
    if weights and median(weights) < LOST:
        return (
            f"the importance weights of tokens are {median(weights):.2f} on average, where 1 means "
            "that none is truncated or masked: sampler and learner differ so much that "
            "algorithm.importance removes many weights; use higher caps, or the same dtype and "
            "engine for both"
        )
    gaps = recent(rows, "update/first_abs_dlogp_max")
    means = recent(rows, "update/abs_dlogp")
    if not gaps or not means or median(gaps) <= TWICE or median(means) <= OFTEN:
        return None
    return (
        "with the same weights, the log-probs of tokens differ between sampler and learner by "
        f"{median(means):.2g} on average and up to {median(gaps):.2g}: every ratio contains this "
        f'error; set {CORRECT}, or model.dtype = "float32"'
    )


@dataclass(frozen=True)
class SelfTest:
    text: str
    broken: bool  # training on such ratios would be useless


def self_test(row: Row, facts: Facts) -> SelfTest | None:
    """The result for the first on-policy update of a process; None if its row has no log-probs.

    `first_abs_dlogp_max` is measured before any optimizer step, the mean over all of them. If the
    policy has only changed, just the mean is large; if replay is broken, both are.
    """
    gap, mean = replayed(row)
    if gap is None or mean is None or not math.isfinite(gap + mean):
        return None
    limit = DISAGREE[facts.dtype]
    if min(gap, mean) > limit:
        text = (
            "sampling and replay disagree: log-probs of the same steps with the same weights "
            f"differ by {mean:.2g} on average and up to {gap:.2g}, where rounding in {facts.dtype} "
            f"explains at most {limit:g}, so the ratio is not 1 and training would be useless; "
            "nothing was saved; look for dropout, a model or step rule that returns different "
            "results on replay, or weights that did not reach the sampler"
        )
        return SelfTest(text, broken=True)
    over = facts.clip is not None and gap > facts.clip
    clip = f", clip {facts.clip:g}" if facts.clip is not None else ""
    if facts.is_language:  # single tokens can be far off
        share = row["update/first_clipped"]
        over, clip = share > FLOORED, f", {share:.0%} clipped"
    verdict = "too large" if over else "ok"
    return SelfTest(
        f"self-test: log-probs of sampling and replay differ by at most {gap:.1e}{clip}: {verdict}",
        broken=False,
    )

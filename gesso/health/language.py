"""Warnings for language models. Rows of image models do not have these metrics."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from gesso.health.rows import SPAN, WINDOW, Facts, Row, plateau, recent, stalled, then_and_now

CUT = 0.25  # share of truncated responses, which teach the model little except brevity
LONGER = 1.5  # times the length at the start of the reward's plateau
FADED = 0.1  # share of the entropy at the start
VARIED, CONSTANT = 0.9, 0.98  # mean length / longest: below VARIED at the start, now above CONSTANT
FAR = 1.0  # nats per token: on average e times as likely as under the reference
LEAP, NEAR = 5.0, 0.1  # times the KL of the SPAN rows before; ignored below NEAR nats per token


def truncated_responses(rows: Sequence[Row], facts: Facts) -> str | None:
    """More than 25% of the responses are truncated at `algorithm.max_tokens`."""
    shares = recent(rows, "response/truncated")
    if not shares or median(shares) <= CUT:
        return None
    return (
        f"{median(shares):.0%} of the responses are truncated at algorithm.max_tokens = "
        f"{facts.max_tokens}: truncated responses rarely contain an answer; raise "
        "algorithm.max_tokens, ask for shorter responses in data.system or data.template, or add "
        "the reward overlong"
    )


def longer_responses(rows: Sequence[Row], facts: Facts) -> str | None:
    """Responses became 1.5 times as long while the reward did not rise."""
    same = plateau(rows)
    lengths = [n for row in same if (n := row.get("response/length")) is not None]
    if not same or len(lengths) < len(same):
        return None
    then, now = fmean(lengths[:SPAN]), fmean(lengths[-SPAN:])
    if now <= LONGER * then:
        return None
    return (
        f"responses grew from {then:.0f} to {now:.0f} tokens {stalled(rows)}: the additional "
        'length does not improve the reward; use algorithm.aggregation = "token-mean" or '
        '"constant", the reward overlong, or a lower algorithm.max_tokens'
    )


def entropy_collapse(rows: Sequence[Row], facts: Facts) -> str | None:
    """The entropy fell below 10% of its initial value and the reward stopped rising."""
    then, now = then_and_now(rows, "update/entropy")
    since = stalled(rows)
    if then is None or now is None or now >= FADED * then or not since:
        return None
    return (
        f"the entropy per token fell from {then:.2g} to {now:.2g} {since}: the policy is nearly "
        "deterministic and no longer explores; raise the upper clip bound "
        "(algorithm.surrogate.high) or algorithm.temperature, lower optimizer.lr, or go back to an "
        "earlier step"
    )


def constant_length(rows: Sequence[Row], facts: Facts) -> str | None:
    """All responses have the same length, unlike at the start, and the reward stopped rising."""
    lengths, longest = (
        then_and_now(rows, "response/length"),
        then_and_now(rows, "response/max_length"),
    )
    then, now = (
        mean / top if mean and top else None for mean, top in zip(lengths, longest, strict=True)
    )
    since = stalled(rows)
    if then is None or now is None or then > VARIED or now < CONSTANT or not since:
        return None
    if truncated_responses(rows, facts):  # all have the maximum length
        return None
    return (
        f"all responses have {lengths[1]:.0f} tokens, whereas at the start the longest had "
        f"{1 / then:.1f} times the mean length, {since}: the model repeats one fixed format; "
        "inspect the responses in report.html, lower optimizer.lr, or add a KL penalty "
        "(algorithm.kl)"
    )


def kl_explodes(rows: Sequence[Row], facts: Facts) -> str | None:
    """Language models: the KL per token is above 1 nat, or 5 times that of the steps before."""
    now = recent(rows, "update/kl")
    before = [
        v for row in rows[-WINDOW - SPAN : -WINDOW] if (v := row.get("update/kl")) is not None
    ]
    if not facts.is_language or not now or len(before) < SPAN:
        return None
    usual = median(before)
    if median(now) <= min(FAR, max(NEAR, LEAP * usual)):
        return None
    return (
        f"the KL to the reference is {median(now):.2g} nats per token, compared with {usual:.2g} "
        f"in the {SPAN} steps before: the policy is diverging from the reference; raise "
        "algorithm.kl.beta, lower optimizer.lr, or go back to an earlier step"
    )

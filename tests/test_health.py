"""Warnings: each kind with rows that must raise it and rows that only nearly do; reported once; the
same after a resume; and all of it through the real loop."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gesso import build, config, run
from gesso.health import CHECKS, REPEAT_AFTER, Facts, Health, Symptom, self_test
from gesso.track.run_folder import RunFolder
from gesso.types import StopRun

ROOT = Path(__file__).parent.parent
USER = "tests.rewards.user_rewards"
FACTS = Facts(
    clip=1e-4,
    updates=1,
    dtype="float32",
    held_out=100,
    watched=("eval/reward", "eval/ocr", "eval/ocr/exact"),
)
Row = dict[str, Any]


def healthy(step: int) -> Row:
    """A row as a good on-policy run writes it; it learns, and evaluates every 5 steps."""
    row: Row = {"step": step}
    if step % 5 == 0:
        row |= {"eval/reward": 0.5 + 0.005 * step, "eval/ocr/exact": 0.3 + 0.005 * step}
    if step == 0:
        return row
    return row | {
        "reward": 0.5 + 0.005 * step,
        "reward/std": 0.3,
        "reward/max": 1.0,
        "reward/at_max": 0.4,
        "advantage/flat_groups": 0.1,
        "diversity": 0.8,
        "update/ratio": 1.0,
        "update/clipped": 0.0,
        "update/abs_dlogp": 2e-8,
        "update/first_abs_dlogp_max": 1e-7,
        "age": 0,
    }


def history(steps: int, **changes: Callable[[int], Any]) -> list[Row]:
    """Healthy rows 0 … steps, some figures of the training rows changed: `reward__std` is
    `reward/std`. Changes of eval figures go to the rows that have one."""
    rows = [healthy(step) for step in range(steps + 1)]
    for row in rows:
        for name, change in changes.items():
            key = name.replace("__", "/")
            if (row["step"] % 5 == 0) if key.startswith("eval/") else row["step"] > 0:
                row[key] = change(row["step"])
    return rows


def always(value: Any) -> Callable[[int], Any]:
    return lambda step: value


def warnings(rows: list[Row], facts: Facts = FACTS) -> list[tuple[int, Symptom]]:
    health = Health(facts)
    return [(row["step"], symptom) for row in rows for symptom in health.feed(row)]


def kinds(rows: list[Row], facts: Facts = FACTS) -> list[str]:
    return [symptom.kind for _, symptom in warnings(rows, facts)]


def only(rows: list[Row], facts: Facts = FACTS) -> tuple[int, str, str]:
    """Step, kind and text of the one warning."""
    ((step, symptom),) = warnings(rows, facts)
    return step, symptom.kind, symptom.text


def with_facts(**changes: Any) -> Facts:
    return Facts(**({name: getattr(FACTS, name) for name in FACTS.__annotations__} | changes))


def test_a_healthy_run_is_silent() -> None:
    assert warnings(history(60)) == []


def test_clip_under_floor() -> None:
    step, kind, text = only(history(40, update__first_abs_dlogp_max=always(2e-4)))
    assert (step, kind) == (1, "clip-under-floor")
    assert "algorithm.clip = 0.0001 is below the noise floor of the ratio, 2.0e-04" in text
    assert kinds(history(40, update__first_abs_dlogp_max=always(1e-4))) == []
    old = history(40, update__first_abs_dlogp_max=always(2e-4), age=always(1))
    assert kinds(old) == []  # the policy has moved: that is no floor
    assert kinds(history(9, update__first_abs_dlogp_max=always(1.0)), with_facts(clip=None)) == [
        "ratio-not-one"
    ]


def test_ratio_not_one() -> None:
    step, kind, text = only(history(40, update__first_abs_dlogp_max=lambda s: 0.02 * (s == 7)))
    assert (step, kind) == (7, "ratio-not-one") and "differ by up to 0.02" in text
    rows = history(40, update__first_abs_dlogp_max=always(0.02))
    assert kinds(rows, with_facts(clip=0.2, dtype="bfloat16")) == []
    assert kinds(history(40, update__first_abs_dlogp_max=always(0.5), age=always(1))) == []


def test_flat_groups() -> None:
    step, kind, text = only(history(40, advantage__flat_groups=always(0.75)))
    assert (step, kind) == (5, "flat-groups") and "in 75% of the groups" in text
    assert kinds(history(40, advantage__flat_groups=always(0.5))) == []
    noisy = history(40, advantage__flat_groups=lambda s: 1.0 if s % 5 in (1, 3) else 0.2)
    assert kinds(noisy) == []  # two bad steps of five


def test_a_constant_reward_is_flat_and_not_saturated() -> None:
    rows = history(
        20,
        reward=always(0.5),
        reward__std=always(0.0),
        reward__max=always(0.5),
        reward__at_max=always(1.0),
        advantage__flat_groups=always(1.0),
    )
    assert only(rows)[:2] == (5, "flat-groups")


def test_saturated() -> None:
    flat = {"advantage__flat_groups": lambda s: 0.6 if s > 10 else 0.0}
    top = {"reward__at_max": lambda s: 0.95 if s > 10 else 0.4}
    step, kind, text = only(history(40, **flat, **top))
    assert (step, kind) == (13, "saturated")
    assert "95% of the samples have the largest reward of the run, 1, and in 60% of" in text
    assert kinds(history(40, **top)) == []  # the groups still differ: it goes on learning
    assert kinds(history(40, **flat, reward__at_max=always(0.7))) == ["flat-groups"]
    below = history(40, **flat, **top, reward__max=lambda s: 1.0 if s < 5 else 0.8)
    assert kinds(below) == ["flat-groups"]  # equal rewards, but better ones have been seen


def test_old_samples() -> None:
    late = {"age": always(1), "update__abs_dlogp": always(6e-4)}
    step, kind, text = only(history(40, **late, update__clipped=always(0.38)))
    assert (step, kind) == (5, "old-samples")
    assert "1 update old and 38% of their terms" in text and "changed by 6.0e-04" in text
    assert kinds(history(40, **late, update__clipped=always(0.2))) == []
    assert kinds(history(40, update__clipped=always(0.38))) == []  # on-policy, updates = 1


def test_clipping_most() -> None:
    """Of two optimizer steps the first cannot clip: a share of .3 is 60% of the second."""
    rows = history(40, update__clipped=always(0.3), update__abs_dlogp=always(1e-3))
    step, kind, text = only(rows, with_facts(updates=2))
    assert (step, kind) == (5, "clipping-most")
    assert "after the first of 2 optimizer steps, 60% of the terms" in text
    assert kinds(rows, with_facts(updates=8)) == []
    assert kinds(rows, with_facts(updates=2, clip=None)) == []  # DGPO: relative to an average
    assert kinds(history(40, update__clipped=always(0.17)), with_facts(updates=2)) == []
    assert kinds(history(40, age=always(1), update__clipped=always(0.24)), FACTS) == []


def test_diversity() -> None:
    step, kind, text = only(history(40, diversity=lambda s: 0.8 * 0.9**s))
    assert kind == "diversity" and 13 <= step <= 18
    assert re.search(r"is 0\.\d+, 2\d% of the 0\.\d+ at the start", text)
    assert kinds(history(40, diversity=lambda s: max(0.8 * 0.9**s, 0.25))) == []
    assert kinds(history(40, diversity=lambda s: 0.8 if s % 7 else 0.01)) == []
    assert kinds(history(40, diversity=always(None))) == []  # groups of one
    assert kinds(history(40, diversity=always(0.01))) == []  # so from the start


def falling(step: int) -> float:
    return 0.6 if step <= 10 else 0.6 - 0.012 * (step - 10)


def test_reward_hacking() -> None:
    step, kind, text = only(history(40, eval__reward=falling, eval__ocr__exact=always(0.5)))
    assert (step, kind) == (20, "reward-hacking")
    assert "since step 5 the training reward rose from 0.54 to 0.59" in text
    assert "held-out eval/reward fell from 0.6 to 0.51" in text
    _, kind, text = only(history(40, eval__ocr__exact=falling))
    assert kind == "reward-hacking" and "eval/ocr/exact fell from 0.57 to 0.45" in text
    assert "inspect the images" in text
    assert "inspect the responses" in only(writing(40, eval__ocr__exact=falling), WRITES)[2]


def test_what_is_no_reward_hacking() -> None:
    both = history(40, eval__reward=falling, reward=falling)
    assert kinds(both) == []  # a collapse, but no hacking
    small = history(40, eval__reward=lambda s: 0.6 - 0.003 * max(0, s - 10))
    assert kinds(small) == []  # .045 over 15 steps: within two standard errors, .06
    wobble = history(40, eval__reward=lambda s: 0.6 - 0.1 * (s % 10 == 5))
    assert kinds(wobble) == []
    course = {20: 0.6, 25: 0.5, 30: 0.52, 35: 0.2, 40: 0.6}
    once = history(40, eval__reward=lambda s: course.get(s, 0.5))
    assert kinds(once) == []  # one low evaluation: the one before it is above .5
    assert kinds(history(40, eval__failed=falling, eval__ocr__longer=falling)) == []
    three = history(15, eval__reward=lambda s: 0.9 - 0.05 * s, eval__ocr__exact=always(0.5))
    assert kinds(three[:-1]) == [] and kinds(three) == ["reward-hacking"]  # the fourth evaluation


def test_a_figure_without_known_spread_must_give_back_a_quarter_of_its_range() -> None:
    def kilobytes(step: int) -> float:
        return -4.0 + 0.2 * min(step, 20) - 0.02 * max(0, step - 20)

    facts = with_facts(watched=("eval/reward", "eval/jpeg"))
    assert kinds(history(60, eval__jpeg=kilobytes), facts) == []
    steeper = history(60, eval__jpeg=lambda s: kilobytes(s) - 0.1 * max(0, s - 20))
    assert kinds(steeper, facts) == ["reward-hacking"]


def test_a_warning_is_repeated_only_after_it_has_been_away() -> None:
    def flat(step: int) -> float:
        return 0.9 if step < 30 or 35 <= step < 50 or step >= 80 else 0.0

    steps = [step for step, _ in warnings(history(100, advantage__flat_groups=flat))]
    assert steps == [5, 82]  # gone for a few rows is not gone
    assert REPEAT_AFTER < 82 - 52
    health = Health(FACTS)
    active = []
    for row in history(100, advantage__flat_groups=flat):
        health.feed(row)
        active.append(health.active)
    assert active[4] == [] and active[5] == active[29] == ["flat-groups"]
    assert active[60] == [] and active[90] == ["flat-groups"]


def test_rebuilt_from_its_rows_it_is_where_it_was() -> None:
    rows = history(
        60,
        advantage__flat_groups=lambda s: 0.9 * (s % 40 < 12),
        diversity=lambda s: 0.8 * 0.93**s,
        eval__reward=falling,
        update__first_abs_dlogp_max=lambda s: 1e-3 if s % 30 == 2 else None,
    )
    whole = warnings(rows)
    assert {s.kind for _, s in whole} >= {"flat-groups", "diversity", "reward-hacking"}
    for cut in range(len(rows)):
        health = Health(FACTS)
        for row in json.loads(json.dumps(rows[:cut])):  # as metrics.jsonl has them
            health.feed(row)
        rest = [(row["step"], symptom) for row in rows[cut:] for symptom in health.feed(row)]
        assert rest == [pair for pair in whole if pair[0] >= cut]


def test_what_is_watched(recipe_data: dict) -> None:
    recipe_data["reward"] = [
        {"name": "ocr"},
        {"name": f"{USER}:brightness", "weight": 0.0},
        {"name": "jpeg-compressibility", "weight": -1.0},
    ]
    recipe = build.recipe_from(recipe_data)
    facts = Facts.of(recipe, build.algorithm(recipe), 3)
    assert "jpeg" not in " ".join(facts.watched)
    assert {"eval/reward", "eval/ocr", "eval/ocr/exact", f"eval/{USER}:brightness"} <= set(
        facts.watched
    )


@pytest.mark.parametrize(
    ("gap", "mean", "dtype", "verdict"),
    [
        (1.2e-7, 1e-8, "float32", "at most 1.2e-07, clip 0.0001: ok"),
        (1e-3, 1e-4, "float32", "at most 1.0e-03, clip 0.0001: too large"),
        (0.5, 1e-4, "float32", "too large"),  # one term: a warning, no reason to stop
        (1e-7, 0.5, "float32", "ok"),  # a later optimizer step moved far: not the replay's fault
        (0.05, 0.02, "bfloat16", "too large"),
        (0.05, 0.02, "float32", None),
        (0.5, 0.2, "bfloat16", None),
    ],
)
def test_self_test(gap: float, mean: float, dtype: str, verdict: str | None) -> None:
    row = {"update/first_abs_dlogp_max": gap, "update/abs_dlogp": mean}
    result = self_test(row, with_facts(dtype=dtype))
    assert result is not None and result.broken == (verdict is None)
    assert (verdict or f"differ by {mean:g} on average and up to {gap:g}") in result.text


@pytest.mark.parametrize(
    ("share", "verdict"), [(0.0, "0% clipped: ok"), (0.03, "3% clipped: too large")]
)
def test_self_test_of_tokens(share: float, verdict: str) -> None:
    row = {
        "update/first_abs_dlogp_max": 0.4,
        "update/abs_dlogp": 1e-3,
        "update/first_clipped": share,
    }
    result = self_test(row, with_facts(clip=3e-4, max_tokens=32, dtype="bfloat16"))
    assert result is not None and not result.broken
    assert (
        result.text
        == f"self-test: log-probs of sampling and replay differ by at most 4.0e-01, {verdict}"
    )


def test_importance_weights_do_not_hide_a_broken_sampler() -> None:
    """The ratio is to the learner's log-probs, so 1 whatever the sampler computed."""
    row = {
        "update/first_abs_dlogp_max": 1e-6,
        "update/abs_dlogp": 1e-7,
        "update/first_clipped": 0.0,
        "update/sampler_gap": 0.3,
        "update/sampler_gap_max": 4.0,
    }
    facts = with_facts(clip=0.2, max_tokens=32, dtype="bfloat16")
    result = self_test(row, facts)
    assert result is not None and result.broken
    assert "differ by 0.3 on average and up to 4" in result.text
    usual = self_test(row | {"update/sampler_gap": 0.03}, facts)
    assert usual is not None and not usual.broken and "at most 4.0e+00" in usual.text
    apart = {"update__sampler_gap": always(0.3), "update__sampler_gap_max": always(4.0)}
    facts = with_facts(clip=0.2, groups=16, max_tokens=32, dtype="bfloat16")
    assert only(writing(20, **apart), facts)[1] == "ratio-not-one"
    assert kinds(writing(20, **apart, age=always(1)), facts) == []  # the policy has moved
    close = apart | {"update__sampler_gap": always(0.03)}
    assert kinds(writing(20, **close), facts) == []


def test_self_test_waits_for_log_probs() -> None:
    assert self_test({"update/drift": 0.1}, FACTS) is None
    nothing = {"update/first_abs_dlogp_max": float("nan"), "update/abs_dlogp": float("nan")}
    assert self_test(nothing, FACTS) is None


WRITES = with_facts(clip=0.2, groups=16, max_tokens=32)
STUCK = {"reward": lambda s: 0.4 + 0.02 * (s % 2)}


def writing(steps: int, **changes: Callable[[int], Any]) -> list[Row]:
    """Rows as a good run of a model that writes has them."""
    usual = {
        "diversity": 0.6,
        "response__length": 100.0,
        "response__max_length": 180.0,
        "response__truncated": 0.02,
        "update__entropy": 0.4,
        "update__kl": 0.01,
        "update__first_clipped": 0.0,
    }
    return history(steps, **({key: always(value) for key, value in usual.items()} | changes))


def test_a_model_that_writes_is_silent_when_well() -> None:
    assert warnings(writing(60), WRITES) == []
    assert warnings(writing(60, **STUCK), WRITES) == []  # it does not learn, and nothing else
    sure = {"diversity": lambda s: 0.6 * 0.9**s, "update__entropy": lambda s: 0.4 * 0.9**s}
    rising = {"reward": lambda s: 0.2 + 0.012 * s + 0.02 * (s % 2)}
    assert warnings(writing(60, **sure, **rising), WRITES) == []  # sure of what is right
    assert warnings(writing(60, **sure, **STUCK, reward__at_max=always(0.8)), WRITES) == []


def test_the_floor_of_tokens_is_the_share_that_rounding_clips() -> None:
    """One token of very many may be far off, and GSPO's clip is one of a mean."""
    odd = {"update__first_abs_dlogp_max": always(0.4), "update__abs_dlogp": always(1e-3)}
    assert kinds(writing(20, **odd), WRITES) == []
    assert kinds(writing(20, **odd), with_facts(clip=3e-4, max_tokens=32, groups=16)) == []
    step, kind, text = only(writing(20, **odd, update__first_clipped=always(0.04)), WRITES)
    assert (step, kind) == (1, "clip-under-floor") and "4% of the tokens are clipped" in text
    assert kinds(writing(20, **odd, update__first_clipped=always(0.02)), WRITES) == []
    late = writing(20, **odd, update__first_clipped=always(0.04), age=always(1))
    assert kinds(late, WRITES) == []


def test_the_ratio_of_tokens_is_judged_by_its_mean() -> None:
    broken = {"update__first_abs_dlogp_max": always(3.0), "update__abs_dlogp": always(0.02)}
    step, kind, text = only(writing(20, **broken), WRITES)
    assert (step, kind) == (1, "ratio-not-one") and "differ by 0.02 on average, more" in text
    moved = {"update__first_abs_dlogp_max": always(1e-6), "update__abs_dlogp": always(0.02)}
    assert kinds(writing(20, **moved), WRITES) == []  # by the optimizer steps after the first


def test_sampler_mismatch() -> None:
    facts = with_facts(clip=0.2, groups=16, max_tokens=32, dtype="bfloat16")
    odd = {"update__first_abs_dlogp_max": always(1.2), "update__abs_dlogp": always(0.04)}
    step, kind, text = only(writing(20, **odd), facts)
    assert (step, kind) == (5, "sampler-mismatch")
    assert "0.04 on average and up to 1.2" in text
    assert 'set algorithm.importance.kind = "token-truncate"' in text
    for less in ({"update__first_abs_dlogp_max": always(0.6)}, {"update__abs_dlogp": always(0.01)}):
        assert kinds(writing(20, **(odd | less)), facts) == []
    assert kinds(writing(20, **odd, age=always(1)), facts) == []  # the policy has moved
    cut = writing(20, update__importance=always(0.8))
    assert (
        only(cut, facts)[1] == "sampler-mismatch" and "are 0.80 on average" in only(cut, facts)[2]
    )
    assert kinds(writing(20, update__importance=always(0.97)), facts) == []


def test_truncated_responses() -> None:
    step, kind, text = only(writing(20, response__truncated=always(0.4)), WRITES)
    assert (step, kind) == (5, "truncated-responses")
    assert "40% of the responses are truncated at algorithm.max_tokens = 32" in text
    assert kinds(writing(20, response__truncated=always(0.25)), WRITES) == []
    assert kinds(writing(20, response__truncated=lambda s: 0.9 * (s % 5 in (1, 3))), WRITES) == []


def test_longer_responses() -> None:
    grows = {"response__length": lambda s: 100.0 + 3 * s, "response__max_length": always(900.0)}
    step, kind, text = only(writing(60, **grows, **STUCK), WRITES)
    assert kind == "longer-responses" and 20 < step <= 40
    assert re.search(r"grew from 1\d\d to \d+ tokens while the reward has not risen for \d\d", text)
    assert kinds(writing(60, **grows), WRITES) == []  # the reward rises with them
    slowly = {"response__length": lambda s: 100.0 + 0.7 * s}
    assert kinds(writing(60, **slowly, **STUCK), WRITES) == []


def test_entropy_collapse() -> None:
    fades = {"update__entropy": lambda s: 0.4 * 0.9**s}
    step, kind, text = only(writing(60, **fades, **STUCK), WRITES)
    assert kind == "entropy-collapse" and 23 <= step <= 30
    assert "(0.41)" in text and "algorithm.surrogate.high" in text
    half = {"update__entropy": lambda s: max(0.1, 0.4 * 0.9**s)}
    assert kinds(writing(60, **half, **STUCK), WRITES) == []
    assert kinds(writing(60, update__entropy=always(0.01), **STUCK), WRITES) == []  # always so


def test_responses_that_are_one_response() -> None:
    step, kind, text = only(writing(60, diversity=lambda s: 0.6 * 0.9**s, **STUCK), WRITES)
    assert kind == "diversity" and step == 20  # when the reward is known to stand
    assert re.search(
        r"9% of the responses to one prompt are distinct, compared with 44% at the start", text
    )
    assert "picture" not in text


def test_constant_length() -> None:
    same = {"response__max_length": lambda s: 180.0 if s < 10 else 101.0}
    step, kind, text = only(writing(60, **same, **STUCK), WRITES)
    assert (step, kind) == (20, "constant-length")
    assert "all responses have 100 tokens" in text and "1.8 times the mean" in text
    assert kinds(writing(60, **same), WRITES) == []
    assert kinds(writing(60, response__max_length=always(101.0), **STUCK), WRITES) == []
    assert kinds(writing(60, **same, **STUCK, response__truncated=always(1.0)), WRITES) == [
        "truncated-responses"
    ]


def test_kl_explodes() -> None:
    step, kind, text = only(writing(60, update__kl=lambda s: 0.05 if s < 30 else 0.4), WRITES)
    assert (step, kind) == (
        32,
        "kl-explodes",
    ) and "0.4 nats per token, compared with 0.05" in text
    assert kinds(writing(60, update__kl=lambda s: 1e-3 if s < 30 else 0.09), WRITES) == []
    assert kinds(writing(60, update__kl=lambda s: 0.01 * s), WRITES) == []  # by and by
    creeping = writing(60, update__kl=lambda s: 0.03 * s)
    assert only(creeping, WRITES)[1] == "kl-explodes"  # beyond 1 however slowly
    assert kinds(history(60, update__kl=lambda s: 0.05 if s < 30 else 9.0)) == []  # it draws
    assert kinds(writing(60, update__kl=lambda s: 5.0 * (s % 7 == 0)), WRITES) == []


def test_groups_that_were_sampled_again_count_as_flat() -> None:
    """32 more groups for 16 that have some spread: two thirds were flat."""
    step, kind, text = only(writing(20, refilled=always(32.0)), WRITES)
    assert (step, kind) == (5, "flat-groups") and "in 70% of the groups" in text
    assert "algorithm.temperature" in text and "noise" not in text
    assert kinds(writing(20, refilled=always(8.0)), WRITES) == []


def test_without_a_comparison_within_groups_flat_ones_are_no_symptom() -> None:
    """PPO's groups of one are always flat."""
    facts = with_facts(clip=0.2, groups=16, max_tokens=32, compares=False)
    alone = {"advantage__flat_groups": always(1.0), "diversity": always(None)}
    assert kinds(writing(20, **alone), facts) == []
    assert kinds(writing(20, **alone, reward__at_max=always(0.9)), facts) == []
    text = only(writing(20, **alone, reward__at_max=always(0.96)), facts)
    assert text[1] == "saturated" and "groups" not in text[2]
    spread = writing(20, reward__at_max=always(0.96))  # groups of several that differ
    assert kinds(spread, facts) == ["saturated"] and kinds(spread, WRITES) == []


def test_what_an_algorithm_for_responses_reports() -> None:
    recipe = build.recipe("demo-vlm")

    def facts(**options: Any) -> Facts:
        changed = recipe.model_copy(update={"algorithm": config.Named(**options)})
        return Facts.of(changed, build.algorithm(changed), 9)

    grpo = facts(name="grpo", updates=2, epochs=3, max_tokens=77)
    assert (grpo.updates, grpo.max_tokens, grpo.groups, grpo.compares) == (6, 77, 16, True)
    assert "eval/count/exact" in grpo.watched and not grpo.separate_eval
    compared = {n: facts(name=n).compares for n in ("rloo", "ppo", "reinforce++", "remax")}
    assert compared == {"rloo": True, "ppo": False, "reinforce++": False, "remax": False}
    judged = recipe.model_copy(update={"eval_reward": [config.RewardEntry(name="choice")]})
    separate = Facts.of(judged, build.algorithm(judged), 9)
    assert separate.watched == ("eval/reward", "eval/choice", "eval/choice/exact")
    assert separate.separate_eval


def test_a_real_run_of_a_model_that_writes_is_silent() -> None:
    """`gesso train demo-vlm steps=40 eval.every=5 eval.prompts=64` on a CPU."""
    rows = rows_of("demo_vlm.jsonl")
    for step, symptom in warnings(
        rows, with_facts(clip=0.2, groups=16, held_out=64, max_tokens=32)
    ):
        assert symptom.kind == "saturated" and rows[step]["reward"] > 0.9


def test_idle_workers() -> None:
    step, kind, text = only(history(20, cluster__idle=lambda s: 0.1 if s < 10 else 0.3))
    assert kind == "idle-workers" and step > 10
    assert "idle for 30%" in text and "learner.micro_batch" in text
    language = writing(20, cluster__idle=lambda s: 0.3)
    assert "learner.micro_tokens" in only(language, WRITES)[2]
    assert kinds(history(20, cluster__idle=lambda s: 0.19)) == []
    apart = {"cluster__idle": lambda s: 0.3, "cluster__weights_gb": lambda s: 1.0}
    assert "set lag = 1, or move devices" in only(history(20, **apart))[2]
    assert "; move devices" in only(history(20, age=lambda s: 1.0, **apart))[2]


def test_a_slow_worker() -> None:
    slow = {"cluster__slowest": lambda s: 1.2 if s < 10 else 9.0}
    step, kind, text = only(history(20, cluster__slowest_rank=lambda s: 2.0, **slow))
    assert kind == "slow-worker" and step > 10
    assert "worker 2 took 9.0 times as long" in text
    assert kinds(history(20, cluster__slowest_rank=lambda s: float(s % 2), **slow)) == []


def rows_of(name: str) -> list[Row]:
    text = (Path(__file__).parent / "rows" / name).read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_real_demo_run_is_silent() -> None:
    """`gesso train demo steps=40 eval.prompts=64 eval.every=5` on a CPU."""
    assert kinds(rows_of("demo.jsonl"), with_facts(held_out=64)) == []


def test_a_real_demo_run_at_lag_one_is_warned_of() -> None:
    """The same with `lag=1 steps=20`: held-out reward .646 → .671, where lag 0 gives .933."""
    step, kind, _ = only(rows_of("demo_lag1.jsonl"), with_facts(held_out=64))
    assert (step, kind) == (6, "old-samples")


def go(data: dict, folder: Path) -> RunFolder:
    return run.train(build.recipe_from(data), folder=folder, quiet=True)


def notes(folder: Path, word: str = "") -> list[str]:
    """Notes with `word`, without date and time."""
    lines = (folder / "log.txt").read_text().splitlines()
    return [line.split(" ", 2)[2] for line in lines if word in line]


def test_every_sitting_tests_itself(recipe_data: dict, tmp_path: Path) -> None:
    go(recipe_data | {"steps": 2}, tmp_path / "run")
    run.resume(tmp_path / "run", quiet=True, steps=3)
    first, second = notes(tmp_path / "run", "self-test")
    pattern = r"self-test: log-probs of .* differ by at most \d\.\de[-+]\d+, clip 0.2: ok"
    assert re.fullmatch(pattern, first) and re.fullmatch(pattern, second)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "self-test: log-probs of sampling" in page and '"diversity"' in page


def test_an_algorithm_without_log_probs_has_nothing_to_test(
    recipe_data: dict, tmp_path: Path
) -> None:
    recipe_data["algorithm"] = {
        "name": "diffusion-nft", "group": 3, "steps": 4, "times": 2, "updates": 1,
    }  # fmt: skip
    rows = go(recipe_data, tmp_path / "run").rows()
    assert not notes(tmp_path / "run", "self-test")
    assert all(row["health"] == [] for row in rows) and all(r["diversity"] > 0 for r in rows[1:])


def test_rows_have_what_proves_a_run(recipe_data: dict, tmp_path: Path) -> None:
    row = go(recipe_data | {"steps": 1}, tmp_path / "run").rows()[1]
    for name in ("ratio", "clipped", "abs_dlogp", "abs_dlogp_max", "first_abs_dlogp_max"):
        assert isinstance(row[f"update/{name}"], float)
    for key in ("update/grad_norm", "advantage/flat_groups", "age", "diversity", "reward/at_max"):
        assert isinstance(row[key], (int, float))
    assert row["reward/at_max"] == pytest.approx(1 / 6) and row["reward/max"] >= row["reward"]


def test_replay_that_disagrees_stops_the_run(
    recipe_data: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gesso.formulas.flow_steps import Transition

    honest = Transition.logp
    go(recipe_data | {"steps": 1}, tmp_path / "run")
    monkeypatch.setattr(
        Transition, "logp", lambda self, x: honest(self, x) + 0.5 * torch.is_grad_enabled()
    )
    with pytest.raises(StopRun, match=r"replay disagree: .* differ by 0\.5 on average") as stopped:
        run.resume(tmp_path / "run", quiet=True, steps=3)
    folder = RunFolder.open(tmp_path / "run")
    assert folder.latest() == 1 and len(folder.rows()) == 2  # as it was before
    assert notes(folder.path)[-1] == f"stopped: {stopped.value}"


def test_a_clip_far_under_the_floor_is_a_warning(
    recipe_data: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gesso.formulas.flow_steps import Transition

    honest = Transition.logp
    monkeypatch.setattr(
        Transition, "logp", lambda self, x: honest(self, x) + 2e-3 * torch.is_grad_enabled()
    )
    recipe_data["algorithm"]["clip"] = 1e-5
    rows = go(recipe_data, tmp_path / "run").rows()
    assert [row["health"] for row in rows] == [[], *[["clip-under-floor"]] * 2]
    test, warning = notes(tmp_path / "run")[-2:]
    assert "at most 2.0e-03, clip 1e-05: too large" in test
    assert warning.startswith("step 1: warning (clip-under-floor): algorithm.clip = 1e-05 is below")


def test_a_constant_reward_through_kill_and_resume(recipe_data: dict, tmp_path: Path) -> None:
    recipe_data |= {"steps": 7, "reward": [{"name": f"{USER}:OnlyScores"}]}
    recipe_data |= {"save": {"every": 4, "keep": 9}}
    recipe_data["eval"] |= {"every": 0}
    whole = go(recipe_data, tmp_path / "whole")
    expected: list[list[str]] = [[]] * 5 + [["flat-groups"]] * 3
    assert [row["health"] for row in whole.rows()] == expected
    (warning,) = notes(whole.path, "warning")
    assert warning.startswith("step 5: warning (flat-groups): in 100% of the groups")

    shutil.copytree(whole.path, tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "checkpoints" / "000007")  # as if killed in step 7
    again = run.resume(tmp_path / "killed", quiet=True)
    assert [row["health"] for row in again.rows()] == expected
    assert notes(again.path, "warning") == [warning]  # repeated steps do not warn twice

    go(recipe_data | {"steps": 6}, tmp_path / "further")
    further = run.resume(tmp_path / "further", quiet=True, steps=7)
    assert [row["health"] for row in further.rows()] == expected
    assert notes(further.path, "warning") == [warning]


def test_the_page_has_a_remedy_for_every_kind() -> None:
    text = (ROOT / "docs" / "how-to" / "diagnose.md").read_text(encoding="utf-8")
    table = text.partition("| warning | likely cause | try |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == set(CHECKS)


def test_a_row_reports_the_distance_within_groups(recipe_data: dict, tmp_path: Path) -> None:
    """Through the loop, against a plain double loop over the same batch drawn again."""
    from gesso.run import assemble, train

    recipe = build.recipe_from(recipe_data | {"steps": 1})
    row = train(recipe, folder=tmp_path / "run", quiet=True).rows()[1]
    job = assemble(recipe)
    try:
        rollout, _ = job.cluster.sample_step(0).result()
    finally:
        job.close()
    clean, group = rollout.flow_trace.clean, rollout.group.tolist()
    apart = [
        float((clean[i] - clean[j]).square().mean().sqrt())
        for i in range(6)
        for j in range(i)
        if group[i] == group[j]
    ]
    assert len(apart) == 6 and row["diversity"] == pytest.approx(sum(apart) / 6, rel=1e-4)

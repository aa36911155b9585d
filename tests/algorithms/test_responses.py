"""Every algorithm for responses: its loss and gradient against plain transformers and Python loops,
its advantages against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from gesso import build
from gesso.algorithms.credit import Credit
from gesso.algorithms.importance import Importance
from gesso.algorithms.policy_gradient import PolicyGradient
from gesso.algorithms.ppo import PPO
from gesso.config import Learner as LearnerSection
from gesso.rollout import Rollout
from gesso.traces.tokens import TokenPrompt, TokenTrace
from gesso.types import Prompt, Sample, Score, UserError
from tests import tokens
from tests.responses import (
    ROWS,
    Hand,
    Parts,
    advantages_by_hand,
    assert_close,
    loss_and_gradient,
    loss_by_hand,
    moved,
    parts_of,
    plain_like,
    plain_logp,
    plain_values,
    recipe_of,
    rollout_of,
)
from tests.tokens import Tiny

CLIP = ("clip", 0.2, 0.2, None)
HANDS = {
    "grpo": Hand("grpo", ("clip", 0.2, 0.3, 3.0)),
    "dr-grpo": Hand("dr-grpo", CLIP, "constant"),
    "dapo": Hand("grpo", ("clip", 0.2, 0.28, None)),
    "gspo": Hand("grpo", ("sequence", 3e-4, 4e-4), "seq-mean-token-mean"),
    "cispo": Hand("grpo", ("weight", 0.0, 5.0)),
    "sapo": Hand("grpo", ("gate", 1.0, 1.05), "seq-mean-token-mean"),
    "rloo": Hand("rloo", CLIP),
    "rloo-tokens": Hand("rloo-tokens", CLIP, whiten=True),
    "reinforce++": Hand("reinforce++", CLIP, whiten=True),
    "reinforce++-baseline": Hand("reinforce++-baseline", CLIP, whiten=True),
    "remax": Hand("remax", CLIP),
    "ppo": Hand("ppo", CLIP, whiten=True),
}
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokens")
    for name in ("qwen2", "qwen2.5-vl"):
        tokens.build(name, root / name)
    return root


@pytest.fixture
def text(folders: Path) -> Tiny:
    return Tiny("qwen2", folders / "qwen2")


def test_every_algorithm_of_the_table_is_tried_here() -> None:
    """Except those of test_likelihood.py and test_opd.py."""
    assert HANDS.keys() | {"sft", "dpo", "opd"} == {
        n for n in build.ALGORITHMS if build.algorithm_class(n).family == "language"
    }


# Loss and gradient of an update


def prepared_parts(tiny: Tiny, name: str, **options: Any) -> tuple[Parts, Rollout]:
    """A policy that has moved since the reference was kept, a critic of its own opinion."""
    sections = {key: options.pop(key) for key in ("model", "learner") if key in options}
    parts = parts_of(tiny, {"name": name, **options}, **sections)
    moved(parts.model.policy.trainable)
    if parts.critic is not None:
        moved(parts.critic.trained, 0.05, seed=11)
    return parts, rollout_of(parts.model, tiny.prompts)


def expected_of(
    tiny: Tiny, parts: Parts, hand: Hand, rollout: Rollout, advantages: Any = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """Of a full fine-tune, the critic's with a trunk that is a copy."""
    plain = plain_like(tiny, parts.model)
    suppressed = parts.model.suppressed
    logp = plain_logp(plain, rollout.token_trace, suppressed)
    reference = values = None
    if hand.kl:
        with torch.no_grad():
            reference = plain_logp(plain_like(tiny), rollout.token_trace, suppressed)
    owners = {n: p for n, p in plain.named_parameters() if n in parts.model.policy.trainable}
    if parts.critic is not None:
        trunk = plain_like(tiny, parts.critic.trunk)
        trunk.lm_head = torch.nn.Identity()
        head = parts.critic.head.detach().double().requires_grad_()
        bias = parts.critic.bias.detach().double().requires_grad_()
        values = plain_values(trunk, head, bias, rollout.token_trace)
        own = dict(trunk.named_parameters()) | {"value.weight": head, "value.bias": bias}
        owners |= {f"beside.{n}": own[n] for n in parts.critic.trained}
    loss = loss_by_hand(hand, rollout, logp, reference, values, advantages)
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in owners.items() if p.grad is not None}


def compare(tiny: Tiny, name: str, hand: Hand, **options: Any) -> tuple[Parts, Rollout]:
    parts, rollout = prepared_parts(tiny, name, **options)
    loss, found = loss_and_gradient(parts, rollout)
    expected, gradient = expected_of(tiny, parts, hand, rollout)
    assert loss == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert_close(found, gradient)
    return parts, rollout


# Images change the sequences, not the loss: with them one algorithm of every kind of loss.
LOSSES = [("qwen2", name) for name in HANDS]
LOSSES += [("qwen2.5-vl", name) for name in ("grpo", "gspo", "cispo", "ppo")]


@pytest.mark.parametrize("model, name", LOSSES)
def test_loss_and_gradient_are_those_by_hand(folders: Path, model: str, name: str) -> None:
    tiny = Tiny(model, folders / model)
    parts, rollout = compare(tiny, name, HANDS[name])
    with torch.no_grad():
        prepared = parts.algorithm.prepare(parts.model, rollout, LearnerSection())
        terms = parts.algorithm.terms(rollout, prepared)
        stats = parts.algorithm.loss(parts.model, terms).stats
    assert (stats["ratio"] - 1).abs().max() > (0.1 if name != "gspo" else 1e-2)
    if name not in ("cispo", "sapo"):
        assert 0.05 < stats["clipped"].mean() < 0.9
    assert len(stats["ratio"]) == int(rollout.mask.sum())


@pytest.mark.parametrize("mode", MODES)
def test_every_aggregation_of_every_kind_of_ratio(text: Tiny, mode: str) -> None:
    more = {"length": 5} if mode == "constant" else {}
    for name in ("grpo", "gspo", "cispo", "ppo"):
        if mode == HANDS[name].aggregation:
            continue  # the default, tested above
        hand = replace(HANDS[name], aggregation=mode, length=5)
        compare(text, name, hand, aggregation=mode, **more)


KINDS = ("k1", "k2", "k3")


@pytest.mark.parametrize("estimator", KINDS)
def test_kl_in_the_loss(text: Tiny, estimator: str) -> None:
    kl = {"place": "loss", "beta": 0.3, "estimator": estimator}
    compare(text, "grpo", replace(HANDS["grpo"], kl=("loss", 0.3, estimator)), kl=kl)


# Every estimator per response and per token
IN_REWARD = [("grpo", "k1"), ("rloo", "k2"), ("remax", "k3")]
IN_REWARD += [("rloo-tokens", "k1"), ("reinforce++", "k2"), ("ppo", "k3")]


@pytest.mark.parametrize("name, estimator", IN_REWARD)
def test_kl_in_the_reward_of_a_response_or_of_a_token(
    text: Tiny, name: str, estimator: str
) -> None:
    kl = {"place": "reward", "beta": 0.3, "estimator": estimator}
    hand = replace(HANDS[name], kl=("reward", 0.3, estimator))
    parts, rollout = compare(text, name, hand, kl=kl)
    bare = parts.algorithm.model_copy(update={"kl": None})
    one, other = (
        a.prepare(parts.model, rollout, LearnerSection()) for a in (bare, parts.algorithm)
    )
    assert (one.advantages - other.advantages).abs().max() > 0.05  # it counts


def test_kl_to_the_reference_of_a_vision_language_model(folders: Path) -> None:
    tiny = Tiny("qwen2.5-vl", folders / "qwen2.5-vl")
    kl = {"place": "loss", "beta": 0.3, "estimator": "k3"}
    compare(tiny, "grpo", replace(HANDS["grpo"], kl=("loss", 0.3, "k3")), kl=kl)


IMPORTANT = [("grpo", "token-truncate"), ("cispo", "token-mask"), ("sapo", "sequence-mask")]
IMPORTANT += [("ppo", "sequence-mask")]


def important(kind: str) -> tuple[dict[str, Any], tuple[str, float, float]]:
    section = {"kind": kind, "cap": 1.2}
    if kind != "sequence-mask":
        return section, (kind, 1.2, 0.0)
    return section | {"mean_cap": 1.1}, (kind, 1.2, 1.1)


@pytest.mark.parametrize("name, kind", IMPORTANT)
def test_importance_weights_of_another_sampler(text: Tiny, name: str, kind: str) -> None:
    """The ratio is to the learner's own log-probs, so 1 here; what was drawn is in the weights.
    Masked tokens stay in the denominator."""
    section, hand = important(kind)
    hands = replace(HANDS[name], importance=hand)
    parts, rollout = compare(text, name, hands, importance=section)
    prepared = parts.algorithm.prepare(parts.model, rollout, LearnerSection())
    weights, bounded = prepared.importance[rollout.mask], prepared.bounded[rollout.mask]
    assert weights.max() <= 1.2 + 1e-6 and 0.1 < bounded.float().mean() < 0.9
    assert (weights == 0).any() == (kind != "token-truncate")
    metrics = parts.learner.update(rollout, 0).metrics
    assert metrics["update/importance"] == pytest.approx(float(weights.mean()))
    assert metrics["update/importance_bounded"] == pytest.approx(float(bounded.float().mean()))
    gap = (prepared.old - rollout.logp)[rollout.mask].abs()
    assert metrics["update/sampler_gap"] == pytest.approx(float(gap.mean()))
    assert metrics["update/first_abs_dlogp_max"] < 1e-5


@pytest.mark.parametrize("kind", ["token-truncate", "sequence-mask"])
def test_importance_and_kl_together(text: Tiny, kind: str) -> None:
    """The KL in the loss has no importance weight."""
    section, hand = important(kind)
    hands = replace(HANDS["grpo"], importance=hand, kl=("loss", 0.3, "k2"))
    kl = {"place": "loss", "beta": 0.3, "estimator": "k2"}
    compare(text, "grpo", hands, importance=section, kl=kl)
    if kind == "token-truncate":
        kl = {"place": "reward", "beta": 0.3, "estimator": "k1"}
        hands = replace(HANDS["reinforce++"], importance=hand, kl=("reward", 0.3, "k1"))
        compare(text, "reinforce++", hands, importance=section, kl=kl)


def test_discount_lambda_and_no_whitening(text: Tiny) -> None:
    for name in ("reinforce++", "ppo", "rloo-tokens"):
        hand = replace(HANDS[name], gamma=0.9, lam=0.8, whiten=False)
        more = {"lam": 0.8} if name == "ppo" else {}
        compare(text, name, hand, advantage={"gamma": 0.9, "whiten": False}, **more)


def gdpo_by_hand(rollout: Rollout) -> list[float]:
    """Each reward normalised in its group, the weighted sum normalised over the batch."""
    n = len(ROWS)
    total = [0.0] * n
    for part, weight in rollout.weights.items():
        values = [s.parts[part] for s in rollout.scores]
        for i in range(n):
            own = [values[j] for j in range(n) if ROWS[j] == ROWS[i]]
            mean = sum(own) / len(own)
            std = math.sqrt(sum((v - mean) ** 2 for v in own) / len(own))
            total[i] += weight * (values[i] - mean) / (std + 1e-4)
    mean = sum(total) / n
    std = math.sqrt(sum((v - mean) ** 2 for v in total) / n)
    return [(v - mean) / (std + 1e-4) for v in total]


def test_gdpo_over_two_rewards(text: Tiny) -> None:
    parts, rollout = prepared_parts(text, "grpo", advantage={"combine": "gdpo"})
    _, found = loss_and_gradient(parts, rollout)
    lengths = rollout.mask.sum(1).tolist()
    each = [[a] * n for a, n in zip(gdpo_by_hand(rollout), lengths, strict=True)]
    _, expected = expected_of(text, parts, HANDS["grpo"], rollout, each)
    assert_close(found, expected)
    summed = parts_of(text, {"name": "grpo"}).algorithm.advantage(rollout)
    assert (summed - parts.algorithm.advantage(rollout)).abs().max() > 0.1


def test_lora_against_peft(text: Tiny, tmp_path: Path) -> None:
    """The gradient of the adapters, and a reference that is the model without them."""
    from peft import PeftModel

    kl = {"place": "loss", "beta": 0.3, "estimator": "k3"}
    lora = {"lora": {"rank": 4, "alpha": 12}}
    parts, rollout = prepared_parts(text, "grpo", kl=kl, model=lora)
    loss, found = loss_and_gradient(parts, rollout)
    parts.model.save(tmp_path)
    plain = PeftModel.from_pretrained(text.plain(), str(tmp_path), is_trainable=True).double()
    logp = plain_logp(plain, rollout.token_trace, parts.model.suppressed)
    with torch.no_grad(), plain.disable_adapter():
        reference = plain_logp(plain, rollout.token_trace, parts.model.suppressed)
    hand = replace(HANDS["grpo"], kl=("loss", 0.3, "k3"))
    expected = loss_by_hand(hand, rollout, logp, reference)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-4)
    own = {n.removeprefix("base_model.model."): p for n, p in plain.named_parameters()}
    assert_close(found, {n: own[n].grad for n in parts.model.policy.trainable})


def test_the_value_loss_is_clipped_where_values_have_moved(text: Tiny) -> None:
    """½·max((v−R)², (clip(v, v_old ± c)−R)²), and which tokens keep their gradient."""
    parts, rollout = prepared_parts(text, "ppo", critic={"clip": 0.05})
    with torch.no_grad():
        prepared = parts.algorithm.prepare(parts.model, rollout, LearnerSection())
        before = parts.critic.values(rollout.token_trace)
        torch.testing.assert_close(before, prepared.values)
        moved(parts.critic.trained, 0.02, seed=12)
        now = parts.critic.values(rollout.token_trace)
    terms = parts.algorithm.terms(rollout, prepared)
    total, cut = 0.0, 0
    lengths = rollout.mask.sum(1).tolist()
    for i, length in enumerate(lengths):
        for t in range(length):
            v, old = float(now[i, t]), float(before[i, t])
            back = float(prepared.returns[i, t])
            near = min(max(v, old - 0.05), old + 0.05)
            cut += near != v
            total += 0.5 * max((v - back) ** 2, (near - back) ** 2) / sum(lengths)
    stats: dict[str, torch.Tensor] = {}
    found = float(parts.algorithm.further(parts.model, terms, stats).sum())
    assert cut > 5 and found == pytest.approx(total, rel=1e-5)
    free = parts.algorithm.model_copy(update={"critic": parts.algorithm.critic.model_copy(
        update={"clip": None})})  # fmt: skip
    assert float(free.further(parts.model, terms, {}).sum()) < total * 0.999
    errors = (now.double() - prepared.returns)[rollout.mask].abs()
    torch.testing.assert_close(stats["value_error"], errors)
    torch.testing.assert_close(stats["value"], now[rollout.mask])


# Micro-batches


SPLIT = [("grpo", False, "token-mean"), ("ppo", False, "seq-mean-token-mean")]
SPLIT += [("ppo", False, "constant"), ("ppo", True, "seq-mean-token-sum")]


@pytest.mark.parametrize("name, lora, mode", SPLIT)
def test_any_split_gives_the_same_gradient(folders: Path, name: str, lora: bool, mode: str) -> None:
    """And any split of what is prepared: reference, values."""
    tiny = Tiny("qwen2.5-vl", folders / "qwen2.5-vl")
    options: dict[str, Any] = {"aggregation": mode, "kl": {"place": "reward"}}
    if lora:
        options |= {"model": {"lora": {"rank": 4, "alpha": 12}}, "critic": {"trunk": "lora"}}
    parts, rollout = prepared_parts(tiny, name, **options)
    found = []
    for budget in (1, 100, 10**6):
        learner = parts.recipe.learner.model_copy(update={"micro_tokens": budget})
        parts.recipe = parts.recipe.model_copy(update={"learner": learner})
        parts.learner.settings = learner
        prepared = parts.algorithm.prepare(parts.model, rollout, parts.recipe.learner)
        terms = parts.algorithm.terms(rollout, prepared)
        pieces = [terms.rows(index) for index in terms.micro_batches(parts.recipe.learner)]
        lengths = [
            sum(len(p.trace.prompts[r]) for r in set(p.trace.row.tolist()))
            + int(p.trace.mask.sum())
            for p in pieces
        ]
        assert max(lengths) <= budget or budget == 1
        assert len(pieces) == {1: 9, 10**6: 1}.get(budget, len(pieces))
        found.append(loss_and_gradient(parts, rollout))
    loss, whole = found[-1]
    assert any(n.startswith("beside.") for n in whole) is (name == "ppo")
    for other_loss, other in found[:-1]:
        assert other_loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert_close(other, whole, 1e-5)


# Passes and updates


def record(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The responses of every mini-batch, as they come."""
    used: list[list[int]] = []
    honest = PolicyGradient.terms

    def terms(self: Any, rollout: Rollout, prepared: Any) -> Any:
        used.append([s.seed for s in rollout.samples])
        assert len(prepared.advantages) == len(rollout.samples)
        return honest(self, rollout, prepared)

    monkeypatch.setattr(PolicyGradient, "terms", terms)
    return used


def test_passes_and_updates(text: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    used = record(monkeypatch)
    options = {"name": "grpo", "updates": 3, "epochs": 2}
    parts = parts_of(text, options)
    rollout = rollout_of(parts.model, text.prompts)
    before = {n: w.clone() for n, w in parts.learner.policy.tensors().items()}
    parts.learner.update(rollout, 4)
    assert parts.learner.optimizer_steps == 6 and [len(u) for u in used] == [3] * 6
    passes = [list(chain(*used[:3])), list(chain(*used[3:]))]
    assert all(sorted(p) == list(range(9)) for p in passes)
    assert passes[0] != passes[1] and passes[0] != list(range(9))
    assert any(not torch.equal(w, before[n]) for n, w in parts.learner.policy.tensors().items())
    first = list(used)
    used.clear()
    parts_of(text, options).learner.update(rollout, 4)
    assert used == first  # of (seed, step) alone
    used.clear()
    parts.learner.update(rollout, 5)
    assert used != first


def test_advantages_belong_to_their_responses_however_shuffled(text: Tiny) -> None:
    """Two updates of a pass, with a learning rate of 0, are the two halves of one gradient."""
    whole = parts_of(text, {"name": "grpo", "aggregation": "seq-mean-token-sum"})
    rollout = rollout_of(whole.model, text.prompts)
    _, expected = loss_and_gradient(whole, rollout)
    cut = parts_of(text, {"name": "grpo", "aggregation": "seq-mean-token-sum", "updates": 3})
    sums: dict[str, torch.Tensor] = {}

    def keep() -> None:
        for n, p in cut.learner.policy.trainable.items():
            sums[n] = sums.get(n, 0.0) + p.grad / 3

    cut.learner._step = keep  # type: ignore[method-assign]
    cut.learner.update(rollout, 0)
    assert_close(sums, expected, 1e-5)


def test_flat_groups_are_dropped_and_count_nowhere(text: Tiny) -> None:
    parts, rollout = prepared_parts(text, "dapo")
    flat = replace(rollout, scores=[
        Score(0.5) if g == 1 else s for s, g in zip(rollout.scores, ROWS, strict=True)
    ])  # fmt: skip
    _, found = loss_and_gradient_of_kept(parts, flat)
    rest = rollout.rows(torch.tensor([0, 1, 2, 6, 7, 8]))
    _, expected = expected_of(text, parts, HANDS["dapo"], rest)
    assert_close(found, expected)
    nothing = replace(rollout, scores=[Score(0.5)] * 9)
    metrics = parts.learner.update(nothing, 0).metrics
    assert metrics["advantage/used"] == 0 and parts.learner.optimizer_steps == 0


def loss_and_gradient_of_kept(parts: Parts, rollout: Rollout) -> tuple[float, Any]:
    found: dict[str, torch.Tensor] = {}
    parts.learner._step = lambda: found.update(  # type: ignore[method-assign]
        {n: p.grad.clone() for n, p in parts.learner._all.items()}
    )
    metrics = parts.learner.update(rollout, 0).metrics
    del parts.learner._step
    assert metrics["advantage/used"] == pytest.approx(6 / 9)
    return 0.0, found


def test_metrics_count_tokens_of_responses_only(text: Tiny) -> None:
    kl = {"place": "loss", "beta": 0.3, "estimator": "k1"}
    parts, rollout = prepared_parts(text, "grpo", kl=kl)
    prepared = parts.algorithm.prepare(parts.model, rollout, LearnerSection())
    mask = rollout.mask
    with torch.no_grad():
        now = parts.model.logp(rollout.token_trace, 0.8)
        reference = parts.model.logp(rollout.token_trace, 0.8, "reference").logp
    gap = (now.logp - rollout.logp)[mask]
    metrics = parts.learner.update(rollout, 0).metrics
    expected = {
        "update/abs_dlogp": gap.abs().mean(),
        "update/first_abs_dlogp_max": gap.abs().max(),
        "update/ratio": gap.exp().mean(),
        "update/entropy": now.entropy[mask].mean(),
        "update/kl": (now.logp - reference)[mask].mean(),
        "advantage/abs_mean": prepared.advantages[mask].abs().mean(),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-4), name


# Advantages by hand

LENGTHS = [2, 1, 3, 1, 2]
GROUP = [0, 0, 0, 1, 1]
VALUES = [1.0, 0.0, 0.0, 2.0, 4.0]
TABLE = {
    # rewards 1 0 0 | 2 4, responses of 2 1 3 | 1 2 tokens; greedy responses .5 | 3
    "grpo": [1.154699, -0.577349, -0.577349, -0.707106, 0.707106],
    "dapo": [1.154699, -0.577349, -0.577349, -0.707106, 0.707106],
    "gspo": [1.154699, -0.577349, -0.577349, -0.707106, 0.707106],
    "cispo": [1.154699, -0.577349, -0.577349, -0.707106, 0.707106],
    "sapo": [1.154699, -0.577349, -0.577349, -0.707106, 0.707106],
    "dr-grpo": [2 / 3, -1 / 3, -1 / 3, -1.0, 1.0],
    "rloo": [1.0, -0.5, -0.5, -2.0, 2.0],
    "remax": [0.5, -0.5, -0.5, -1.0, 1.0],
    # of all 9 tokens: mean 2/9, variance 15/9 − 4/81
    "rloo-tokens": [0.611593, -0.567908, -0.567908, -1.747410, 1.397927],
    # mean 4/3, variance 38/9 − 16/9
    "reinforce++": [-0.213201, -0.852803, -0.852803, 0.426401, 1.705606],
    # mean 1/9, variance 39/81 − 1/81
    "reinforce++-baseline": [0.811107, -0.648886, -0.648886, -1.622214, 1.297771],
}


def scored(rewards: list[float]) -> Rollout:
    """Scores of responses whose words do not matter."""
    mask = torch.arange(3) < torch.tensor(LENGTHS)[:, None]
    ids = torch.zeros(4, dtype=torch.long)
    trace = TokenTrace(
        [TokenPrompt(ids, ids)] * 2,
        torch.tensor(GROUP),
        torch.zeros(5, 3, dtype=torch.long),
        mask,
        torch.zeros(5, dtype=torch.bool),
    )
    return Rollout(
        [Sample(Prompt("?"), None, i, "") for i in range(5)],
        torch.tensor(GROUP),
        trace,
        torch.zeros(5, 3),
        0,
        [Score(r, {"x": r}) for r in rewards],
        {"x": 1.0},
        torch.tensor([0.5, 0.5, 0.5, 3.0, 3.0], dtype=torch.float64),
    )


@pytest.mark.parametrize("name", TABLE)
def test_advantages_by_hand(name: str) -> None:
    found = build.algorithm_class(name)().advantage(scored(VALUES))
    mask = scored(VALUES).mask
    expected = torch.tensor(TABLE[name], dtype=torch.float64)[:, None].expand(5, 3)
    torch.testing.assert_close(found, torch.where(mask, expected, 0.0), rtol=0, atol=2e-6)
    assert found.dtype == torch.float64
    hand, _ = advantages_by_hand(
        HANDS[name], VALUES, GROUP, LENGTHS, [0.5, 0.5, 0.5, 3.0, 3.0], None
    )
    assert torch.tensor(list(chain(*hand))).double().allclose(found[mask], atol=1e-6)


def test_kl_and_discount_by_hand() -> None:
    rollout = scored(VALUES)
    penalty = torch.zeros(5, 3)
    penalty[2] = torch.tensor([0.1, 0.2, 0.4])
    bare: dict[str, Any] = {"baseline": "zero", "std": "one"}
    found = Credit(**bare, per="token", gamma=0.5)(rollout, penalty)
    assert found[2].tolist() == pytest.approx([-0.1 - 0.1 - 0.1, -0.2 - 0.2, -0.4])
    assert found[4].tolist() == pytest.approx([2.0, 4.0, 0.0])  # the last token's, discounted
    found = Credit(**bare, per="response")(rollout, penalty)
    assert found[2].tolist() == pytest.approx([-0.7] * 3)
    found = Credit(std="one")(rollout, penalty)  # before the group's mean is taken
    assert found[:3, 0].tolist() == pytest.approx([0.9, -0.1, -0.8])
    clipped = Credit(baseline="others", std="one", clip=1.5)(rollout)
    assert clipped[:, 0].tolist() == pytest.approx([1.0, -0.5, -0.5, -1.5, 1.5])
    spread = Credit(std="global")(rollout)  # unbiased: rewards 1 0 0 2 4 have variance 2.8
    assert spread[3, 0] == pytest.approx(-1 / math.sqrt(2.8), rel=1e-5)


class Opinion:
    """A critic that has made up its mind."""

    def __init__(self, values: list[list[float]]) -> None:
        self.known = torch.tensor(values)

    def values(self, trace: TokenTrace) -> torch.Tensor:
        assert len(trace.row) == 5
        return self.known


def test_generalised_advantages_by_hand() -> None:
    """λ = ½, γ = 1. Response 0: δ = (.6−.2, 1−.6), A = (.4+.2, .4); response 4: δ = (2−1, 4−2)."""
    values = [[0.2, 0.6, 9.0], [0.5, 9.0, 9.0], [0.0, 0.0, 0.0], [1.0, 9.0, 9.0], [1.0, 2.0, 9.0]]
    algorithm = PPO(lam=0.5, advantage=Credit(baseline="zero", std="one", per="token"))
    algorithm = algorithm.with_critic(Opinion(values))
    model: Any = None  # which only the critic needs
    found = algorithm.prepare(model, scored(VALUES), LearnerSection())
    rows = [[0.6, 0.4, 0.0], [-0.5, 0.0, 0.0], [0.0] * 3, [1.0, 0.0, 0.0], [2.0, 2.0, 0.0]]
    assert found.advantages.tolist() == [pytest.approx(row) for row in rows]
    back = [[0.8, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0] * 3, [2.0, 0.0, 0.0], [3.0, 4.0, 0.0]]
    assert found.returns.tolist() == [pytest.approx(row, abs=1e-7) for row in back]
    judged = PPO(lam=0.5).with_critic(Opinion(values))
    whitened = judged.prepare(model, scored(VALUES), LearnerSection())
    inside = whitened.advantages[scored(VALUES).mask]
    assert inside.mean() == pytest.approx(0, abs=1e-12)
    assert inside.square().mean() == pytest.approx(1)
    assert whitened.returns.equal(found.returns)  # taken before the whitening


def test_flat_groups_of_one_and_equal_rewards_teach_nothing() -> None:
    flat = scored([1.0, 1.0, 1.0, 2.0, 4.0])
    for name in ("grpo", "dr-grpo", "rloo"):
        assert not build.algorithm_class(name)().advantage(flat)[:3].any(), name
    dapo = build.algorithm_class("dapo")()
    assert dapo.advantage.kept(flat, 1).tolist() == [3, 4]
    assert dapo.advantage.kept(flat, 4).tolist() == [0, 1, 3, 4]  # equal mini-batches
    assert build.algorithm_class("grpo")().advantage.kept(flat, 1).tolist() == [0, 1, 2, 3, 4]
    both = replace(flat, scores=[
        Score(1.0, {"x": a, "y": 1 - a}) for a in (0.0, 1.0, 0.5, 0.5, 0.5)
    ], weights={"x": 1.0, "y": 1.0})  # fmt: skip
    credit = Credit(combine="gdpo", drop_flat=True)
    assert credit.kept(both, 1).tolist() == [0, 1, 2]  # they differ, though not in their sum
    assert Credit(drop_flat=True).kept(both, 1).tolist() == []


# Recipes


@pytest.mark.parametrize("name", HANDS)
def test_a_recipe_without_options_gives_the_algorithm_itself(text: Tiny, name: str) -> None:
    """Also out of the resolved recipe that a run writes down, and out of what that resolves to."""
    bare = {"name": name}
    recipe = recipe_of(text, bare)
    own = build.algorithm_class(name)(group=3, temperature=0.8, max_tokens=12)
    assert build.algorithm(recipe) == own
    again = build.recipe_from(recipe.model_dump(exclude_none=True))
    assert again == recipe and build.algorithm(again) == own


def test_one_option_of_a_section_leaves_the_others(text: Tiny) -> None:
    def of(name: str, **options: Any) -> Any:
        recipe = recipe_of(text, {"name": name, **options})
        made = build.algorithm(recipe)
        assert build.algorithm(build.recipe_from(recipe.model_dump(exclude_none=True))) == made
        return made

    own = of("dr-grpo", advantage={"drop_flat": True}).advantage
    assert own == Credit(std="one", drop_flat=True)
    assert of("ppo", advantage={"gamma": 0.9}).advantage.whiten
    assert of("grpo", surrogate={"low": 0.1}).surrogate.dual == 3.0
    assert of("grpo", surrogate={"dual": "none"}).surrogate.model_dump() == {
        "kind": "clip", "low": 0.2, "high": 0.3, "dual": None,
    }  # fmt: skip
    assert of("rloo-tokens", advantage={"clip": "none"}).advantage.clip is None
    other = of("grpo", surrogate={"kind": "weight", "upper": 4.0}).surrogate
    assert (other.kind, other.upper) == ("weight", 4.0)
    assert of("grpo", kl={"beta": 0.5, "estimator": "none"}).kl.estimator == "k3"


def test_options_are_turned_off_in_overrides_and_over_a_base(text: Tiny, tmp_path: Path) -> None:
    import tomli_w

    base = recipe_of(text, {"name": "grpo"}).model_dump(exclude_none=True)
    for key in ("about", "source"):
        base.pop(key)
    (tmp_path / "base.toml").write_text(tomli_w.dumps(base))
    (tmp_path / "mine.toml").write_text(
        'base = "base.toml"\n[algorithm.surrogate]\ndual = "none"\n'
        '[algorithm.advantage]\nstd = "one"\n'
    )
    mine = build.algorithm(build.recipe(str(tmp_path / "mine.toml")))
    assert mine.surrogate.dual is None and mine.advantage.std == "one"  # type: ignore[attr-defined]
    overrides = ["algorithm.surrogate.dual=none", "algorithm.advantage.std=one"]
    theirs = build.algorithm(build.recipe(str(tmp_path / "base.toml"), overrides))
    assert theirs == mine


def test_another_engine_is_corrected_by_default(text: Tiny) -> None:
    """And a run resumes with what it was started with."""

    def of(engine: str, name: str = "grpo", **options: Any) -> Any:
        recipe = recipe_of(text, {"name": name, **options}, sampler={"engine": engine})
        made = build.algorithm(recipe)
        again = build.recipe_from(recipe.model_dump(exclude_none=True))
        assert again == recipe and build.algorithm(again) == made
        return made.importance  # type: ignore[attr-defined]

    assert of("built-in") is None and of("built-in", importance="none") is None
    for name in HANDS:
        assert of("vllm", name) == Importance(kind="token-truncate", cap=2.0)
    assert of("vllm", importance="none") is None
    assert of("vllm", importance={"cap": 3.0}) == Importance(cap=3.0)
    assert of("vllm", importance={"kind": "token-mask"}) == Importance(kind="token-mask")
    for engine in ("built-in", "vllm"):
        masked = {"kind": "sequence-mask", "mean_cap": 1.01}
        assert of(engine, importance=masked) == Importance(kind="sequence-mask", mean_cap=1.01)
        assert of(engine, importance_cap=1.5) == Importance(cap=1.5)  # of earlier versions


BAD = [
    ({"name": "flow-grpo"}, "is for flow models, but model.name .* use one of grpo, dr-grpo"),
    ({"name": "rloo", "advantage": {"std": "group"}}, 'std = "group" requires baseline = "mean"'),
    ({"name": "grpo", "advantage": {"combine": "gdpo", "std": "one"}}, '"gdpo" requires baseline'),
    ({"name": "grpo", "advantage": {"gamma": 0.9}}, 'gamma discounts .* requires per = "token"'),
    ({"name": "grpo", "length": 9}, 'length requires aggregation = "constant", got'),
    ({"name": "rloo", "group": 1}, "compared with each other; use group = 2"),
    ({"name": "ppo", "group": 1, "advantage": {"drop_flat": True}}, "compared with each other"),
    ({"name": "grpo", "refills": 1}, "set advantage.drop_flat = true"),
    (
        {"name": "remax", "refills": 1, "advantage": {"drop_flat": True}},
        "refills do not support baseline = .greedy.",
    ),
    ({"name": "ppo", "advantage": {"per": "response"}}, "the critic is the baseline"),
    ({"name": "ppo", "advantage": {"baseline": "mean"}}, "the critic is the baseline"),
    ({"name": "ppo", "advantage": {"clip": 5.0}}, "advantage.clip applies to one advantage"),
    (
        {"name": "grpo", "advantage": {"combine": "gdpo"}, "kl": {"place": "reward"}},
        "does not support a KL",
    ),
    ({"name": "grpo", "surrogate": {"dual": 0.5}}, "greater than 1"),
    ({"name": "sapo", "surrogate": {"tau_pos": 0.0}}, '"surrogate.tau_pos" = 0.0 .* or equal to'),
    ({"name": "sapo", "surrogate": {"low": 0.2}}, 'key "surrogate.low"; allowed: kind, tau_pos'),
    ({"name": "grpo", "surrogate": {"kind": "soft"}}, "'soft'.*'clip', 'sequence', .*'gate'"),
    ({"name": "grpo", "importance": {"cap": 1.0}}, '"importance.cap" = 1.0 .* greater than 1'),
    ({"name": "grpo", "importance_cap": -1}, '"importance.cap" = -1 .* greater than 1'),
    ({"name": "grpo", "importance": 2, "importance_cap": 2}, '"importance" = 2 is not valid'),
    ({"name": "grpo", "importance": {"kind": "mask"}}, "expected one of 'token-truncate', 'token"),
    ({"name": "grpo", "importance": {"mode": "off"}}, 'unknown key "importance.mode"'),
    (
        {"name": "grpo", "importance": {"mean_cap": 1.1}},
        'importance: mean_cap requires kind = "sequence-mask", got kind = "token-truncate"',
    ),
    ({"name": "grpo", "kl": {"estimator": "k4"}}, "expected one of 'k1', 'k2', 'k3'"),
    ({"name": "grpo", "advantage": {"baseline": "median"}}, "expected one of 'mean', 'others'"),
    ({"name": "grpo", "temperature": 0.0}, "greater than 0"),
    ({"name": "grpo", "top_p": 0.9}, 'unknown key "top_p"'),
    ({"name": "ppo", "critic": {"trunk": "shared"}}, "expected one of 'copy', 'lora'"),
]


@pytest.mark.parametrize("algorithm, sentence", BAD)
def test_mistakes_are_one_sentence(text: Tiny, algorithm: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        recipe_of(text, algorithm)
    assert "\n" not in str(caught.value)


def test_refills_do_not_go_with_lag(text: Tiny) -> None:
    with pytest.raises(UserError, match=r"refills = .* requires lag = 0, got lag = 1"):
        recipe_of(text, {"name": "dapo"}, lag=1)


def test_a_micro_batch_is_moved_without_its_trace(text: Tiny) -> None:
    """Nested tensors, too; the meta device stands for a GPU."""
    parts = parts_of(text, {"name": "grpo", "kl": {"beta": 0.1}})
    rollout = rollout_of(parts.model, text.prompts)
    prepared = parts.algorithm.prepare(parts.model, rollout, parts.learner.settings)
    terms = parts.algorithm.terms(rollout, prepared)
    moved = terms.on(torch.device("meta"))
    on_device = [moved.weights, moved.prepared.old, moved.prepared.reference]
    assert {tensor.device.type for tensor in on_device} == {"meta"}
    assert moved.trace is terms.trace and not terms.weights.is_meta

"""Responses to real prompts with made-up scores, and the losses of every algorithm for them written
down once more: plain transformers in float64, padded, and Python loops over responses and tokens.

Nothing here calls gesso.formulas or reads a default of an algorithm.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gesso import build, config
from gesso.learner.learner import Learner
from gesso.rollout import Rollout
from gesso.traces.tokens import TokenTrace
from gesso.types import Prompt, Sample, Score
from tests.tokens import Tiny, padded_logits, trace_of

ROWS = [0, 0, 0, 1, 1, 1, 2, 2, 2]
REWARDS = [0.1, 0.9, 0.4, 1.5, 0.3, 0.8, 0.7, 0.2, 0.7]
GREEDY = [0.3, 0.3, 0.3, 1.1, 1.1, 1.1, 0.6, 0.6, 0.6]
TEMPERATURE = 0.8


def recipe_of(tiny: Tiny, algorithm: dict[str, Any], **sections: Any) -> config.Recipe:
    """A recipe whose data is never read."""
    model = {"name": "vision-language" if tiny.sees else "causal", "path": str(tiny.folder)}
    likelihood = algorithm["name"] in ("sft", "dpo")  # at temperature 1
    sampling = {} if likelihood else {"temperature": TEMPERATURE}
    data: dict[str, Any] = {
        "model": model | {"device": "cpu"} | sections.pop("model", {}),
        "data": {"train": "x", "eval": "x", "groups": 3},
        "algorithm": {"group": 3, "max_tokens": 12} | sampling | algorithm,
        "reward": [{"name": "tests.rewards.user_rewards:constant", "value": 1.0}],
        "optimizer": {"lr": 1e-3, "weight_decay": 0.0, "max_norm": 1e9},
    }
    return build.recipe_from(data | sections)


@dataclass
class Parts:
    recipe: config.Recipe
    model: Any
    algorithm: Any
    learner: Learner
    critic: Any


def parts_of(tiny: Tiny, algorithm: dict[str, Any], **sections: Any) -> Parts:
    recipe = recipe_of(tiny, algorithm, **sections)
    chosen, model = build.algorithm(recipe), build.model(recipe)
    chosen, critic = build.add_critic(recipe, chosen, model)
    learner = Learner(model, chosen, recipe.optimizer, recipe.learner, recipe.seed, critic)
    return Parts(recipe, model, chosen, learner, critic)


def moved(tensors: Any, scale: float = 0.02, seed: int = 7) -> None:
    """Weights that have moved on."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        tensor.data += scale * torch.randn(tensor.shape, generator=generator)


def rollout_of(model: Any, asked: list[Prompt], spread: float = 0.25, seed: int = 5) -> Rollout:
    """9 responses of 1 to 9 tokens in groups of 3. They were drawn by a policy whose log-probs lie
    `spread` beside the current ones: many ratios are clipped."""
    trace = trace_of(model, asked, ROWS, seed)
    with torch.no_grad():
        now = model.logp(trace, TEMPERATURE).logp.cpu()
    generator = torch.Generator().manual_seed(seed)
    drawn = now + spread * torch.randn(now.shape, generator=generator)
    second = [r * r - 0.5 * r for r in REWARDS]
    return Rollout(
        samples=[Sample(asked[r], None, i, f"response {i}") for i, r in enumerate(ROWS)],
        group=torch.tensor(ROWS),
        trace=trace,
        logp=torch.where(trace.mask, drawn, 0.0),
        version=0,
        scores=[
            Score(2 * a + b, {"one": a, "two": b}) for a, b in zip(REWARDS, second, strict=True)
        ],
        weights={"one": 2.0, "two": 1.0},
        greedy=torch.tensor(GREEDY, dtype=torch.float64),
    )


# By hand


@dataclass(frozen=True)
class Hand:
    """What an algorithm is, as its paper has it."""

    advantage: str
    surrogate: tuple[Any, ...] = ("clip", 0.2, 0.2, None)
    aggregation: str = "token-mean"
    length: int = 12
    kl: tuple[str, float, str] | None = None  # place, beta, estimator
    importance: tuple[str, float, float] | None = None  # kind, cap, mean_cap
    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = False


def plain_like(tiny: Tiny, model: Any = None) -> Any:
    """transformers' own module in float64, with the current weights of a full fine-tune."""
    plain = copy.deepcopy(tiny.plain_unchanged()).double()
    if model is not None:
        state = {n: t.detach().double() for n, t in model.policy.tensors().items()}
        missing = plain.load_state_dict(state, strict=False)
        assert not missing.unexpected_keys
    return plain


def plain_logp(plain: Any, trace: TokenTrace, suppressed: Tensor) -> list[list[Tensor]]:
    """Of each token of each response."""
    trace = _double(trace)
    logits = padded_logits(plain, trace, 0) / TEMPERATURE
    allowed = torch.ones(logits.shape[-1], dtype=torch.bool)
    allowed[suppressed] = False
    every = logits[..., allowed]
    found = []
    for i, length in enumerate(trace.mask.sum(1).tolist()):
        row = []
        for t in range(length):
            sum_exp = torch.exp(every[i, t]).sum()
            row.append(logits[i, t, trace.tokens[i, t]] - torch.log(sum_exp))
        found.append(row)
    return found


def plain_values(trunk: Any, head: Tensor, bias: Tensor, trace: TokenTrace) -> list[list[Tensor]]:
    """`trunk`: a plain module whose head does nothing."""
    states = padded_logits(trunk, _double(trace), 0)
    return [
        [states[i, t] @ head + bias for t in range(n)]
        for i, n in enumerate(trace.mask.sum(1).tolist())
    ]


def _double(trace: TokenTrace) -> TokenTrace:
    from dataclasses import replace

    return replace(
        trace,
        prompts=[
            p if p.pixels is None else replace(p, pixels=p.pixels.double()) for p in trace.prompts
        ],
    )


def k(estimator: str, logp: Any, reference: Any) -> Any:
    k1 = logp - reference
    if estimator == "k1":
        return k1
    return 0.5 * k1**2 if estimator == "k2" else torch.exp(-k1) + k1 - 1


def floats(rows: list[list[Any]]) -> list[list[float]]:
    return [[float(x.detach()) for x in row] for row in rows]


def advantages_by_hand(
    hand: Hand,
    rewards: list[float],
    groups: list[int],
    lengths: list[int],
    greedy: list[float],
    penalty: list[list[float]] | None,
    values: list[list[float]] | None = None,
) -> tuple[list[list[float]], list[list[float]]]:
    """Of each token; and returns, of a critic."""
    n = len(rewards)
    rewards = list(rewards)
    per_token = hand.advantage in ("rloo-tokens", "reinforce++", "reinforce++-baseline", "ppo")
    if penalty and not per_token:
        rewards = [r - sum(p) for r, p in zip(rewards, penalty, strict=True)]
    each = []
    for i in range(n):
        own = [rewards[j] for j in range(n) if groups[j] == groups[i]]
        mean = sum(own) / len(own)
        if hand.advantage == "grpo":
            std = math.sqrt(sum((r - mean) ** 2 for r in own) / (len(own) - 1))
            each.append((rewards[i] - mean) / (std + 1e-6))
        elif hand.advantage in ("dr-grpo", "reinforce++-baseline"):
            each.append(rewards[i] - mean)
        elif hand.advantage in ("rloo", "rloo-tokens"):
            each.append(rewards[i] - (sum(own) - rewards[i]) / (len(own) - 1))
        elif hand.advantage == "remax":
            each.append(rewards[i] - greedy[i])
        else:
            assert hand.advantage in ("reinforce++", "ppo")
            each.append(rewards[i])
    if not per_token:
        return [[a] * s for a, s in zip(each, lengths, strict=True)], []
    if hand.advantage == "rloo-tokens":
        each = [min(10.0, max(-10.0, a)) for a in each]
    found, returns = [], []
    for i, length in enumerate(lengths):
        at = [0.0] * length
        at[-1] = each[i]
        if penalty:
            at = [a - p for a, p in zip(at, penalty[i], strict=True)]
        row, back = [0.0] * length, [0.0] * length
        for t in reversed(range(length)):
            last = t == length - 1
            if values is None:
                row[t] = at[t] + (0.0 if last else hand.gamma * row[t + 1])
            else:
                following = 0.0 if last else values[i][t + 1]
                delta = at[t] + hand.gamma * following - values[i][t]
                row[t] = delta + (0.0 if last else hand.gamma * hand.lam * row[t + 1])
                back[t] = row[t] + values[i][t]
        found.append(row)
        returns.append(back)
    if hand.whiten:
        every = [a for row in found for a in row]
        mean = sum(every) / len(every)
        std = math.sqrt(sum((a - mean) ** 2 for a in every) / len(every))
        found = [[(a - mean) / std for a in row] for row in found]
    return found, returns


def token_loss(hand: Hand, logp: Tensor, old: float, advantage: float, mean: float) -> Tensor:
    """`mean`: of log ρ over the response."""
    kind, *bounds = hand.surrogate
    if kind == "sequence":
        low, high = bounds
        ratio = math.exp(mean) * torch.exp(logp - logp.detach())
    else:
        ratio = torch.exp(logp - old)
    if kind == "gate":
        tau = bounds[0] if advantage > 0 else bounds[1]
        return -advantage * (4 / tau) / (1 + torch.exp(-tau * (ratio - 1)))
    if kind == "weight":
        lower, upper = bounds
        weight = min(max(float(ratio.detach()), lower), upper)
        return -weight * advantage * logp
    low, high = bounds[:2]
    clipped = ratio.clamp(1 - low, 1 + high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage)
    dual = bounds[2] if kind == "clip" else None
    if dual is not None and advantage < 0:
        loss = torch.minimum(loss, torch.tensor(-dual * advantage, dtype=loss.dtype))
    return loss


def importance_of(hand: Hand, gaps: list[float]) -> list[float]:
    """Of the tokens of a response, from ℓ_learner − ℓ_sampler of each."""
    assert hand.importance is not None
    kind, cap, mean_cap = hand.importance
    each = [math.exp(gap) for gap in gaps]
    if kind == "token-mask":
        return [w if 1 / cap <= w <= cap else 0.0 for w in each]
    geometric = math.prod(each) ** (1 / len(each))
    keep = kind == "token-truncate" or 1 / mean_cap <= geometric <= mean_cap
    return [min(w, cap) if keep else 0.0 for w in each]


def weight_of(hand: Hand, lengths: list[int], i: int) -> float:
    return {
        "token-mean": 1 / sum(lengths),
        "seq-mean-token-mean": 1 / (len(lengths) * lengths[i]),
        "seq-mean-token-sum": 1 / len(lengths),
        "constant": 1 / (len(lengths) * hand.length),
    }[hand.aggregation]


def loss_by_hand(
    hand: Hand,
    rollout: Rollout,
    logp: list[list[Tensor]],
    reference: list[list[Tensor]] | None = None,
    values: list[list[Tensor]] | None = None,
    advantages: list[list[float]] | None = None,
) -> Tensor:
    """Of one update with all responses, before any weight has moved since `logp` and `values`."""
    lengths = [len(row) for row in logp]
    drawn = [rollout.logp[i, :n].double().tolist() for i, n in enumerate(lengths)]
    old = drawn if hand.importance is None else floats(logp)
    ref = floats(reference) if reference else None
    penalty = None
    if hand.kl and hand.kl[0] == "reward":
        assert ref is not None
        penalty = [
            [hand.kl[1] * float(k(hand.kl[2], torch.tensor(o, dtype=torch.float64), r))
             for o, r in zip(a, b, strict=True)]
            for a, b in zip(old, ref, strict=True)
        ]  # fmt: skip
    assert rollout.greedy is not None
    found, returns = advantages_by_hand(
        hand, rollout.rewards.tolist(), rollout.group.tolist(), lengths, rollout.greedy.tolist(),
        penalty, floats(values) if values else None,
    )  # fmt: skip
    if advantages is not None:
        found = advantages
    total = torch.zeros((), dtype=torch.float64)
    for i, length in enumerate(lengths):
        now = [float(each.detach()) for each in logp[i]]
        mean = sum(now[t] - old[i][t] for t in range(length)) / length
        important = [1.0] * length
        if hand.importance is not None:
            important = importance_of(hand, [old[i][t] - drawn[i][t] for t in range(length)])
        for t in range(length):
            each = token_loss(hand, logp[i][t], old[i][t], found[i][t], mean)
            each = each * important[t]
            if hand.kl and hand.kl[0] == "loss":
                assert ref is not None
                each = each + hand.kl[1] * k(hand.kl[2], logp[i][t], ref[i][t])
            if values is not None:
                each = each + 0.5 * (values[i][t] - returns[i][t]) ** 2
            total = total + weight_of(hand, lengths, i) * each
    return total


# What Gesso does


def loss_and_gradient(parts: Parts, rollout: Rollout) -> tuple[float, dict[str, Tensor]]:
    """Of the first update, through `Learner.update` itself; the weights stay as they are."""
    found: dict[str, Tensor] = {}
    learner = parts.learner

    def keep() -> None:
        found.update({n: p.grad.clone() for n, p in learner._all.items() if p.grad is not None})

    honest, learner._step = learner._step, keep  # type: ignore[method-assign]
    try:
        metrics = learner.update(rollout, 0).metrics
    finally:
        learner._step = honest  # type: ignore[method-assign]
    assert metrics["update/skipped"] == 0
    with torch.no_grad():
        prepared = parts.algorithm.prepare(parts.model, rollout, parts.recipe.learner)
        terms = parts.algorithm.terms(rollout, prepared)
        pieces = [terms.rows(index) for index in terms.micro_batches(parts.recipe.learner)]
        assert sum(len(piece) for piece in pieces) == len(terms) == len(rollout.samples)
        loss = sum(float(parts.algorithm.loss(parts.model, p).loss.sum()) for p in pieces)
    return loss / terms.total, found


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], most: float = 1e-4) -> None:
    """Parameter by parameter; one whose gradient is 0 but for rounding is held to the others."""
    assert found.keys() == expected.keys()
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    assert norm > 1e-3
    for name, g in expected.items():
        apart = float((found[name].double() - g.double()).norm())
        assert apart <= most * float(g.norm()) + 2e-6 * norm, name

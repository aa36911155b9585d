"""Policy gradients for language models: advantage × ratio × surrogate × aggregation × KL.

Every algorithm for tokens is a preset of `PolicyGradient`; PPO adds a critic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gesso import config
from gesso.algorithms.base import Prepared, TermLosses, Terms
from gesso.algorithms.credit import Credit
from gesso.algorithms.importance import Importance
from gesso.config import Strict
from gesso.devices import to_device
from gesso.formulas import kl, objectives
from gesso.formulas.aggregation import Mode, token_weights
from gesso.models.tokens.base import TokenModel, ValueFunction
from gesso.models.tokens.packing import pack_responses
from gesso.ranks import ALONE, Ranks, fill
from gesso.rollout import Rollout
from gesso.traces.tokens import TokenTrace
from gesso.types import ResponseSpec, Scales, Which
from gesso.weights.policy import Policy


class Clip(Strict):
    """PPO: the ratio of every token, clipped to [1 − low, 1 + high]. `dual` also bounds the loss of
    tokens with a negative advantage."""

    kind: Literal["clip"] = "clip"
    """PPO's clipped ratio per token."""
    low: float = Field(0.2, gt=0, lt=1)
    """Clips the ratio below 1 − low."""
    high: float = Field(0.2, gt=0)
    """Clips the ratio above 1 + high."""
    dual: float | None = Field(None, gt=1)
    """Dual clip: bounds the loss of tokens with negative advantage at this multiple of it. None:
    off."""

    @property
    def range(self) -> float | None:
        return min(self.low, self.high)

    def __call__(
        self, logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor
    ) -> objectives.Surrogate:
        return objectives.token_clipped(logp, old, advantage, self.low, self.high, self.dual)


class SequenceClip(Strict):
    """GSPO: one ratio per response, the geometric mean of its tokens' ratios."""

    kind: Literal["sequence"] = "sequence"
    """GSPO: one ratio per response, the geometric mean of the token ratios."""
    low: float = Field(3e-4, gt=0, lt=1)
    """Clips the ratio below 1 − low."""
    high: float = Field(4e-4, gt=0)
    """Clips the ratio above 1 + high."""

    @property
    def range(self) -> float | None:
        return min(self.low, self.high)

    def __call__(
        self, logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor
    ) -> objectives.Surrogate:
        return objectives.sequence_clipped(logp, old, advantage, mask, self.low, self.high)


class Weight(Strict):
    """CISPO: a policy gradient weighted by the bounded ratio. The bounds are ratios."""

    kind: Literal["weight"] = "weight"
    """CISPO: the detached, bounded ratio weights a policy gradient."""
    lower: float = Field(0.0, ge=0)
    """Lower bound of the ratio."""
    upper: float = Field(5.0, gt=1)
    """Upper bound of the ratio."""

    @property
    def range(self) -> float | None:
        return self.upper - 1

    def __call__(
        self, logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor
    ) -> objectives.Surrogate:
        return objectives.cispo(logp, old, advantage, self.lower, self.upper)


class Gate(Strict):
    """SAPO: the ratio in a sigmoid instead of a clip."""

    kind: Literal["gate"] = "gate"
    """SAPO: a sigmoid of the ratio instead of a clip."""
    tau_pos: float = Field(1.0, ge=1e-3, le=1e3)
    """τ for positive advantages: steepness of the sigmoid."""
    tau_neg: float = Field(1.05, ge=1e-3, le=1e3)
    """τ for other advantages."""

    @property
    def range(self) -> float | None:
        """Distance from 1 at which the gate is one half, 4σ(1 − σ) = ½."""
        return math.log(3 + math.sqrt(8)) / max(self.tau_pos, self.tau_neg)

    def __call__(
        self, logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor
    ) -> objectives.Surrogate:
        return objectives.sapo(logp, old, advantage, self.tau_pos, self.tau_neg)


Surrogate = Annotated[Clip | SequenceClip | Weight | Gate, Field(discriminator="kind")]


class KL(Strict):
    """Distance to the reference policy, token by token."""

    place: Literal["loss", "reward"] = "loss"
    """Add the KL to the "loss" or subtract it from the "reward"."""
    beta: float = Field(0.01, gt=0)
    """Weight of the KL."""
    estimator: kl.Estimator = "k3"
    """KL estimator: "k1", "k2" or "k3"."""


@dataclass(frozen=True)
class PreparedResponses(Prepared):
    """One value per token of a rollout. Tensors not used by the algorithm have shape (N, 0)."""

    old: Tensor  # (N, S) log-probs in the ratio's denominator
    importance: Tensor  # (N, S) weights that correct for a sampler with another engine
    bounded: Tensor  # (N, S) bool: such a weight is truncated or masked
    gap: Tensor  # (N, S) |log-prob of the learner − that of the sampler|, with `importance`
    reference: Tensor  # (N, S) log-probs of the reference policy
    values: Tensor  # (N, S) of the critic
    returns: Tensor  # (N, S)


@dataclass(frozen=True)
class ResponseTerms(Terms):
    """One response per term."""

    trace: TokenTrace
    prepared: PreparedResponses
    weights: Tensor  # (T, S): of each token, in the loss of the whole mini-batch

    def __len__(self) -> int:
        return len(self.trace.row)

    def micro_batches(self, settings: config.Learner) -> Sequence[Tensor]:
        return batches(self.trace, settings.micro_tokens)

    def cost(self, index: Tensor) -> float:
        return tokens_of(self.trace, index)


def batches(trace: TokenTrace, budget: int) -> list[Tensor]:
    """Micro-batches of rows whose tokens, including prompts, fit into `budget`; each row once."""
    prompts = [len(prompt) for prompt in trace.prompts]
    responses = trace.mask.sum(1).tolist()
    parts = pack_responses(prompts, trace.row.tolist(), responses, budget)
    return [torch.tensor(part) for part in parts]


def by_response(
    compute: Callable[[TokenTrace], Tensor],
    trace: TokenTrace,
    settings: config.Learner,
    ranks: Ranks,
) -> Tensor:
    """(N, S) float32 on the CPU: one value per token, computed for packed responses."""
    values = torch.zeros(trace.tokens.shape)
    parts = batches(trace, settings.micro_tokens)
    costs = [tokens_of(trace, part) for part in parts]
    fill(values, parts, costs, lambda part: compute(trace.rows(part)), ranks)
    return values


def tokens_of(trace: TokenTrace, index: Tensor) -> float:
    """Tokens of these responses and of their prompts, each prompt once."""
    prompts = sum(len(trace.prompts[row]) for row in set(trace.row[index].tolist()))
    return prompts + float(trace.mask[index].sum())


class PolicyGradient(Strict):
    name: str
    """Name of the algorithm."""
    group: int = Field(8, ge=1)
    """Responses per prompt."""
    updates: int = Field(1, ge=1)
    """Optimizer steps per pass over the responses."""
    epochs: int = Field(1, ge=1)
    """Passes over the responses."""
    max_tokens: int = Field(1024, ge=1)
    """Maximum response length."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; log-probs are of the same distribution. Top-p and top-k are not
    offered: they would bias every ratio."""
    surrogate: Surrogate = Clip()
    """Policy objective: clip, sequence, weight or gate."""
    aggregation: Mode = "token-mean"
    """From token losses to one loss: "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", or
    "constant" (sum divided by `length`)."""
    length: int | None = Field(None, ge=1)
    """Divisor of "constant". None: max_tokens."""
    kl: KL | None = None
    """KL to the reference model."""
    advantage: Credit = Credit()
    """Advantage settings."""
    importance: Importance | None = None
    """Corrects for a sampler with another engine or precision. None: off; with vLLM the default is
    "token-truncate"."""
    refills: int = Field(0, ge=0)
    """How often groups without reward spread are replaced by groups of new prompts (DAPO). Requires
    `advantage.drop_flat`."""
    probe: int | None = Field(None, ge=2)
    """Responses per prompt that are sampled and scored first. A group ends with them if their
    rewards are equal; the others are completed to `group`. Requires `advantage.drop_flat`. None:
    all groups are complete."""

    family: ClassVar[config.FamilyName] = "language"
    whole_groups: ClassVar[bool] = False
    given: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _importance_cap(cls, data: Any) -> Any:
        """Accepts `importance_cap`, which recipes of earlier versions have, as `importance.cap`."""
        if not isinstance(data, dict) or "importance_cap" not in data:
            return data
        options: dict[str, Any] = {"importance": {}} | data
        cap = {"cap": options.pop("importance_cap")}
        if isinstance(options["importance"], dict):
            options["importance"] = options["importance"] | cap
        return options

    @model_validator(mode="after")
    def _possible(self) -> PolicyGradient:
        if self.length is not None and self.aggregation != "constant":
            raise ValueError(
                f'length requires aggregation = "constant", got aggregation = "{self.aggregation}"'
            )
        if self.refills and not self.advantage.drop_flat:
            raise ValueError("refills replace dropped groups; set advantage.drop_flat = true")
        if self.probe is not None and not self.advantage.drop_flat:
            raise ValueError("probe ends groups without spread; set advantage.drop_flat = true")
        if self.probe is not None and self.probe >= self.group:
            raise ValueError(f"probe = {self.probe} must be less than group = {self.group}")
        compares = self.advantage.baseline in ("mean", "others") or self.advantage.drop_flat
        if self.group == 1 and compares:
            raise ValueError(
                "the responses of a group are compared with each other; use group = 2 or more"
            )
        in_reward = self.kl is not None and self.kl.place == "reward"
        if in_reward and self.advantage.combine == "gdpo" and self.advantage.per == "response":
            raise ValueError(
                'combine = "gdpo" normalises each reward separately and does not support a KL in '
                'their sum; use kl.place = "loss", or advantage.per = "token"'
            )
        if self.greedy_spec() and self.refills:
            raise ValueError('refills do not support baseline = "greedy"; set refills = 0')
        if self.greedy_spec() and self.probe:
            raise ValueError('probe does not support baseline = "greedy"; remove probe')
        return self

    @property
    def needs(self) -> frozenset[Which]:
        return frozenset({"reference"} if self.kl else ())

    @property
    def terms_a_sample(self) -> int:
        return 1

    @property
    def clip_range(self) -> float | None:
        return self.surrogate.range

    @property
    def critic_network(self) -> ValueFunction | None:
        """The critic, if the algorithm has one."""
        return None

    def spec(self, step: int, seed: int, model: config.AnyModel) -> ResponseSpec:
        return ResponseSpec(self.max_tokens, self.temperature)

    def eval_spec(
        self, watched: config.Eval, model: config.AnyModel, weights: Which
    ) -> ResponseSpec:
        return ResponseSpec(self.max_tokens, watched.temperature, weights)

    def greedy_spec(self) -> ResponseSpec | None:
        return ResponseSpec(self.max_tokens, 0.0) if self.advantage.baseline == "greedy" else None

    def prepare(
        self,
        model: TokenModel,
        rollout: Rollout,
        settings: config.Learner,
        ranks: Ranks = ALONE,
    ) -> PreparedResponses:
        sampled = rollout.logp
        unused = sampled.new_empty(len(sampled), 0)
        old, importance, bounded, gap = sampled, unused, unused, unused
        if self.importance is not None:
            old = self._score(model, rollout, "current", settings, ranks)
            weights = self.importance(old, sampled, rollout.mask)
            importance, bounded, gap = weights.weight, weights.bounded, (old - sampled).abs()
        reference = unused
        if self.kl:
            reference = self._score(model, rollout, "reference", settings, ranks)
        penalty = None
        if self.kl and self.kl.place == "reward":
            penalty = self.kl.beta * kl.estimate(old, reference, self.kl.estimator)
            penalty = torch.where(rollout.mask, penalty, 0.0)
        advantages, values, returns = self.estimate(model, rollout, penalty, settings, ranks)
        return PreparedResponses(
            advantages, old, importance, bounded, gap, reference, values, returns
        )

    def estimate(
        self,
        model: TokenModel,
        rollout: Rollout,
        penalty: Tensor | None,
        settings: config.Learner,
        ranks: Ranks = ALONE,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Advantages (N, S), and the values and returns of the critic."""
        unused = rollout.logp.new_empty(len(rollout.logp), 0)
        return self.advantage(rollout, penalty), unused, unused

    @torch.no_grad()
    def _score(
        self,
        model: TokenModel,
        rollout: Rollout,
        weights: Which,
        settings: config.Learner,
        ranks: Ranks,
    ) -> Tensor:
        """(N, S) log-probs of the responses under these weights."""

        def logp(trace: TokenTrace) -> Tensor:
            return model.logp(trace, self.temperature, weights).logp

        return by_response(logp, rollout.token_trace, settings, ranks)

    def terms(self, rollout: Rollout, prepared: PreparedResponses) -> ResponseTerms:
        length = (self.length or self.max_tokens) if self.aggregation == "constant" else None
        weights = token_weights(rollout.mask, self.aggregation, length)
        return ResponseTerms(1, rollout.token_trace, prepared, weights)

    def complete(
        self, model: TokenModel, terms: ResponseTerms, settings: config.Learner, ranks: Ranks
    ) -> ResponseTerms:
        return terms

    def loss(self, model: TokenModel, terms: ResponseTerms) -> TermLosses:
        scored = model.logp(terms.trace, self.temperature)
        logp = scored.logp
        terms = terms.on(logp.device)
        prepared, select = terms.prepared, terms.trace.select
        mask = to_device(terms.trace.mask, logp.device)
        surrogate = self.surrogate(logp, prepared.old, prepared.advantages.float(), mask)
        token_loss = surrogate.loss  # (T, S)
        if self.importance is not None:
            token_loss = token_loss * prepared.importance
        stats = {
            "ratio": select(surrogate.ratio),
            "clipped": select(surrogate.clipped).float(),
            "abs_dlogp": select((logp - prepared.old).abs().detach()),
            "entropy": select(scored.entropy),
        }
        if self.kl:
            distance = kl.estimate(logp, prepared.reference, self.kl.estimator)
            stats["kl"] = select(distance.detach())
            if self.kl.place == "loss":
                token_loss = token_loss + self.kl.beta * distance
        if self.importance is not None:
            stats |= {
                "importance": select(prepared.importance),
                "importance_bounded": select(prepared.bounded).float(),
                "sampler_gap": select(prepared.gap),
            }
        loss = (terms.weights * token_loss).sum(1)
        return TermLosses(loss + self.further(model, terms, stats), stats)

    def further(self, model: TokenModel, terms: ResponseTerms, stats: dict[str, Tensor]) -> Tensor:
        """(T,) loss per response in addition to the policy loss; 0 without a critic."""
        return terms.weights.new_zeros(len(terms))

    def with_kl(self, factor: float) -> PolicyGradient | None:
        if self.kl is None:
            return None
        kl = self.kl.model_copy(update={"beta": self.kl.beta * factor})
        return self.model_copy(update={"kl": kl})

    def next_scales(self, scales: Scales, rows: Sequence[Mapping[str, Any]]) -> Scales:
        """Nothing changes between iterations."""
        return scales

    def with_share(self, share: float) -> PolicyGradient:
        raise AssertionError("algorithms for language models have no gate")

    def finish(self, policy: Policy, optimizer_steps: int) -> None:
        """Nothing to do: the next batch is sampled with the weights just trained."""

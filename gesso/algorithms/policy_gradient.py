"""Policy gradients for models that write: advantage × ratio × surrogate × aggregation × KL.

Every algorithm for tokens is a preset over the class below; PPO adds a critic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gesso import config
from gesso.algorithms.base import Prepared, TermLosses, Terms
from gesso.algorithms.credit import Credit
from gesso.config import Strict
from gesso.formulas import kl, objectives
from gesso.formulas.aggregation import Mode, token_weights
from gesso.models.tokens.base import TokenModel
from gesso.models.tokens.packing import pack_responses
from gesso.rollout import Rollout, TokenTrace
from gesso.types import ReplySpec, Which
from gesso.weights.policy import Policy


class Clip(Strict):
    """PPO's clip of every token's ratio to [1 − low, 1 + high]; `dual` bounds bad tokens, too."""

    kind: Literal["clip"] = "clip"
    low: float = Field(0.2, gt=0, lt=1)
    high: float = Field(0.2, gt=0)
    dual: float | None = Field(None, gt=1)

    @property
    def range(self) -> float | None:
        return min(self.low, self.high)

    def __call__(self, logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Found:
        return objectives.token_clipped(logp, old, advantage, self.low, self.high, self.dual)


class SequenceClip(Strict):
    """GSPO's: one ratio a reply, the geometric mean of its tokens'."""

    kind: Literal["sequence"] = "sequence"
    low: float = Field(3e-4, gt=0, lt=1)
    high: float = Field(4e-4, gt=0)

    @property
    def range(self) -> float | None:
        return min(self.low, self.high)

    def __call__(self, logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Found:
        return objectives.sequence_clipped(logp, old, advantage, mask, self.low, self.high)


class Weight(Strict):
    """CISPO's: the ratio, bounded, weighs a plain policy gradient. The bounds are ratios."""

    kind: Literal["weight"] = "weight"
    lower: float = Field(0.0, ge=0)
    upper: float = Field(5.0, gt=1)

    @property
    def range(self) -> float | None:
        return self.upper - 1

    def __call__(self, logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Found:
        return objectives.cispo(logp, old, advantage, self.lower, self.upper)


Found = objectives.Surrogate
Surrogate = Annotated[Clip | SequenceClip | Weight, Field(discriminator="kind")]


class KL(Strict):
    """Distance to the reference policy, token by token."""

    place: Literal["loss", "reward"] = "loss"
    beta: float = Field(0.01, gt=0)
    estimator: kl.Estimator = "k3"


@dataclass(frozen=True)
class Known(Prepared):
    """Of every token of a rollout. Empty, (N, 0), where nobody asked."""

    old: Tensor  # (N, S) log-probs of the policy that the ratio is taken to
    importance: Tensor  # (N, S) weights where the sampler was another engine
    gap: Tensor  # (N, S) |log-prob of the learner − that of the sampler|, in the same place
    reference: Tensor  # (N, S) log-probs
    values: Tensor  # (N, S) of the critic
    returns: Tensor  # (N, S)


@dataclass(frozen=True)
class ReplyTerms(Terms):
    """One reply each."""

    trace: TokenTrace
    known: Known
    weights: Tensor  # (T, S): of each token in the loss of the whole mini-batch

    def __len__(self) -> int:
        return len(self.trace.row)

    def rows(self, index: slice | Tensor) -> ReplyTerms:
        return ReplyTerms(
            self.total, self.trace.rows(index), self.known.rows(index), self.weights[index]
        )

    def micro(self, settings: config.Learner) -> Iterator[ReplyTerms]:
        for part in batches(self.trace, settings.micro_tokens):
            yield self.rows(part)


def batches(trace: TokenTrace, budget: int) -> list[Tensor]:
    """Rows that fit into one pass of so many tokens, prompts included, each once."""
    prompts = [len(prompt) for prompt in trace.prompts]
    replies = trace.mask.sum(1).tolist()
    parts = pack_responses(prompts, trace.row.tolist(), replies, budget)
    return [torch.tensor(part) for part in parts]


class ReplyAlgorithm(Strict):
    name: str
    group: int = Field(8, ge=1)
    updates: int = Field(1, ge=1)
    epochs: int = Field(1, ge=1)
    max_tokens: int = Field(1024, ge=1)  # of a reply; longer ones are cut
    temperature: float = Field(1.0, gt=0)
    surrogate: Surrogate = Clip()
    aggregation: Mode = "token-mean"
    length: int | None = Field(None, ge=1)  # what "constant" divides by; None: max_tokens
    kl: KL | None = None
    advantage: Credit = Credit()
    importance_cap: float | None = Field(None, gt=0)  # weights for a sampler of another engine
    refills: int = Field(0, ge=0)

    family: ClassVar[config.Family] = "writes"

    @model_validator(mode="after")
    def _possible(self) -> ReplyAlgorithm:
        if self.length is not None and self.aggregation != "constant":
            raise ValueError(f'length goes with aggregation = "constant", not "{self.aggregation}"')
        if self.refills and not self.advantage.drop_flat:
            raise ValueError("refills replace dropped groups; set advantage.drop_flat = true")
        compares = self.advantage.baseline in ("mean", "others") or self.advantage.drop_flat
        if self.group == 1 and compares:
            raise ValueError("the replies of a group are compared with each other; use group = 2")
        in_reward = self.kl is not None and self.kl.place == "reward"
        if in_reward and self.advantage.combine == "gdpo" and self.advantage.per == "reply":
            raise ValueError(
                'combine = "gdpo" takes each reward by itself and has no place for a KL in their '
                'sum; use kl.place = "loss", or advantage.per = "token"'
            )
        if self.greedy_spec() and self.refills:
            raise ValueError("refills are not for a baseline of greedy replies; set refills = 0")
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

    def spec(self, step: int, seed: int, model: config.AnyModel) -> ReplySpec:
        return ReplySpec(self.max_tokens, self.temperature)

    def eval_spec(self, watched: config.Eval, model: config.AnyModel, weights: Which) -> ReplySpec:
        return ReplySpec(self.max_tokens, watched.temperature, weights)

    def greedy_spec(self) -> ReplySpec | None:
        return ReplySpec(self.max_tokens, 0.0) if self.advantage.baseline == "greedy" else None

    def prepare(self, model: TokenModel, rollout: Rollout, settings: config.Learner) -> Known:
        drawn = rollout.logp
        none = drawn.new_empty(len(drawn), 0)
        old, importance, gap = drawn, none, none
        if self.importance_cap is not None:
            old = self._score(model, rollout, "current", settings)
            importance = objectives.importance(old, drawn, self.importance_cap)
            gap = (old - drawn).abs()
        reference = self._score(model, rollout, "reference", settings) if self.kl else none
        penalty = None
        if self.kl and self.kl.place == "reward":
            penalty = self.kl.beta * kl.estimate(old, reference, self.kl.estimator)
            penalty = torch.where(rollout.mask, penalty, 0.0)
        advantages, values, returns = self.estimate(model, rollout, penalty, settings)
        return Known(advantages, old, importance, gap, reference, values, returns)

    def estimate(
        self, model: TokenModel, rollout: Rollout, penalty: Tensor | None, settings: config.Learner
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Advantages (N, S), and of a critic values and returns."""
        none = rollout.logp.new_empty(len(rollout.logp), 0)
        return self.advantage(rollout, penalty), none, none

    @torch.no_grad()
    def _score(
        self, model: TokenModel, rollout: Rollout, weights: Which, settings: config.Learner
    ) -> Tensor:
        """(N, S) log-probs of the replies under other weights."""
        found = torch.zeros_like(rollout.logp)
        for part in batches(rollout.replies, settings.micro_tokens):
            logp = model.logp(rollout.replies.rows(part), self.temperature, weights).logp
            found[part, : logp.shape[1]] = logp.to(found)
        return found

    def terms(self, rollout: Rollout, prepared: Known, generator: torch.Generator) -> ReplyTerms:
        length = (self.length or self.max_tokens) if self.aggregation == "constant" else None
        weights = token_weights(rollout.mask, self.aggregation, length)
        return ReplyTerms(1, rollout.replies, prepared, weights)

    def loss(self, model: TokenModel, terms: ReplyTerms) -> TermLosses:
        known, mask = terms.known, terms.trace.mask
        now = model.logp(terms.trace, self.temperature)
        logp = now.logp
        found = self.surrogate(logp, known.old, known.advantages.float(), mask)
        each = found.loss
        if self.importance_cap is not None:
            each = each * known.importance
        stats = {
            "ratio": found.ratio[mask],
            "clipped": found.clipped[mask].float(),
            "abs_dlogp": (logp - known.old).abs().detach()[mask],
            "entropy": now.entropy[mask],
        }
        if self.kl:
            distance = kl.estimate(logp, known.reference, self.kl.estimator)
            stats["kl"] = distance.detach()[mask]
            if self.kl.place == "loss":
                each = each + self.kl.beta * distance
        if self.importance_cap is not None:
            stats |= {"importance": known.importance[mask], "sampler_gap": known.gap[mask]}
        loss = (terms.weights * each).sum(1)
        return TermLosses(loss + self.further(model, terms, stats), stats)

    def further(self, model: TokenModel, terms: ReplyTerms, stats: dict[str, Tensor]) -> Tensor:
        """(T,) what a reply costs beside the policy's loss: nothing, without a critic."""
        return terms.weights.new_zeros(len(terms))

    def finish(self, policy: Policy, optimizer_steps: int) -> None:
        """Nothing to do: the next batch is drawn with the weights just trained."""

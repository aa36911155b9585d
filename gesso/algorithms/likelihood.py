"""Base class of the algorithms that weight the log-probs of responses: no ratio, no advantage.

A subclass defines the weights. A response is one term, and its loss does not depend on the others,
so that responses are packed into micro-batches as in `policy_gradient.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from gesso import config
from gesso.algorithms.base import TermLosses, Terms
from gesso.algorithms.policy_gradient import batches, tokens_of
from gesso.config import Strict
from gesso.models.tokens.base import TokenModel
from gesso.ranks import Ranks
from gesso.traces.tokens import TokenTrace
from gesso.types import ResponseSpec, Scales, Which
from gesso.weights.policy import Policy

TEMPERATURE = 1.0  # of the trained distribution


@dataclass(frozen=True)
class LikelihoodTerms(Terms):
    """One response per term."""

    trace: TokenTrace
    weights: Tensor  # (T, S): of each token's log-prob in the loss of the mini-batch
    sign: Tensor  # (T,): 1 to raise the response's likelihood, −1 to lower it
    group: Tensor  # (T,)
    reference: Tensor  # (T,): summed log-prob under the reference; (T, 0) if it is not used
    stats: Tensor  # (T, n): values of the mini-batch's responses to report

    def __len__(self) -> int:
        return len(self.trace.row)

    def micro_batches(self, settings: config.Learner) -> Sequence[Tensor]:
        return batches(self.trace, settings.micro_tokens)

    def cost(self, index: Tensor) -> float:
        return tokens_of(self.trace, index)


class LikelihoodAlgorithm(Strict):
    name: str
    """Name of the algorithm."""
    group: int = Field(1, ge=1)
    """Responses per prompt."""
    updates: int = Field(1, ge=1)
    """Optimizer steps per pass over the responses."""
    epochs: int = Field(1, ge=1)
    """Passes over the responses of a step."""
    max_tokens: int = Field(1024, ge=1)
    """Maximum response length; rows with longer responses are skipped."""

    family: ClassVar[config.FamilyName] = "language"
    whole_groups: ClassVar[bool] = False
    refills: ClassVar[int] = 0
    probe: ClassVar[None] = None
    temperature: ClassVar[float] = TEMPERATURE
    terms_a_sample: ClassVar[int] = 1
    clip_range: ClassVar[None] = None
    reported: ClassVar[Sequence[str]] = ()  # names of the columns of `LikelihoodTerms.stats`

    @property
    def needs(self) -> frozenset[Which]:
        return frozenset()

    def spec(self, step: int, seed: int, model: config.AnyModel) -> ResponseSpec:
        return ResponseSpec(self.max_tokens, TEMPERATURE)

    def eval_spec(
        self, watched: config.Eval, model: config.AnyModel, weights: Which
    ) -> ResponseSpec:
        return ResponseSpec(self.max_tokens, watched.temperature, weights)

    def greedy_spec(self) -> None:
        """None: there is no baseline."""

    def complete(
        self, model: TokenModel, terms: LikelihoodTerms, settings: config.Learner, ranks: Ranks
    ) -> LikelihoodTerms:
        return terms

    def loss(self, model: TokenModel, terms: LikelihoodTerms) -> TermLosses:
        """−Σ weight·ℓ."""
        logp = model.logp(terms.trace, TEMPERATURE).logp
        terms = terms.on(logp.device)
        stats = {"nll": -terms.trace.select(logp.detach())}
        stats |= dict(zip(self.reported, terms.stats.unbind(1), strict=True))
        return TermLosses(-(terms.weights * logp).sum(1), stats)

    def with_kl(self, factor: float) -> None:
        """None: there is no KL."""

    def next_scales(self, scales: Scales, rows: Sequence[Mapping[str, Any]]) -> Scales:
        """Nothing changes between iterations."""
        return scales

    def finish(self, policy: Policy, optimizer_steps: int) -> None:
        """Nothing to do: the reference stays."""

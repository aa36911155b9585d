"""Correction for a sampler whose log-probs differ from the learner's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor

from gesso.config import Strict
from gesso.formulas import objectives

MEAN_CAP = 1.02
"""A mean gap of .03 per token, usual in bfloat16, is a standard deviation of .04 and, for the mean
over 32 tokens, of .007: a third of log 1.02. NeMo-RL's bounds, .999 and 1.002, are for responses of
thousands of tokens."""


class Importance(Strict):
    """Weights of the tokens' losses, w = π_learner / π_sampler with a bound."""

    kind: Literal["token-truncate", "token-mask", "sequence-mask"] = "token-truncate"
    """"token-truncate": w = min(π_learner/π_sampler, cap). "token-mask": 0 outside [1/cap, cap].
    "sequence-mask": truncated, and 0 in responses whose geometric mean is outside
    [1/mean_cap, mean_cap]."""
    cap: float = Field(2.0, gt=1)
    """Bound of w."""
    mean_cap: float = Field(MEAN_CAP, gt=1)
    """Bound of the geometric mean."""

    @model_validator(mode="after")
    def _possible(self) -> Importance:
        if self.kind != "sequence-mask" and self.mean_cap != MEAN_CAP:
            raise ValueError(
                f'mean_cap requires kind = "sequence-mask", got kind = "{self.kind}"; remove '
                "mean_cap or change kind"
            )
        return self

    def __call__(self, learner: Tensor, sampler: Tensor, mask: Tensor) -> objectives.Importance:
        if self.kind == "token-truncate":
            return objectives.token_truncated(learner, sampler, self.cap)
        if self.kind == "token-mask":
            return objectives.token_masked(learner, sampler, self.cap)
        return objectives.sequence_masked(learner, sampler, mask, self.cap, self.mean_cap)

"""GRPO (arXiv 2402.03300) for language models, and variants that differ in one choice.

The surrogate of `grpo` follows EasyR1; the others follow their papers or first implementations. By
default there is no KL; recipes add it.
"""

from __future__ import annotations

from pydantic import Field

from gesso.algorithms.credit import Credit
from gesso.algorithms.policy_gradient import Clip, PolicyGradient, SequenceClip, Surrogate, Weight
from gesso.formulas.aggregation import Mode


class GRPO(PolicyGradient):
    name: str = "grpo"
    surrogate: Surrogate = Clip(low=0.2, high=0.3, dual=3.0)


class DrGRPO(PolicyGradient):
    """Dr.GRPO (arXiv 2503.20783): the gradient is normalised neither by the spread of a group nor
    by the length of a response."""

    name: str = "dr-grpo"
    aggregation: Mode = "constant"
    advantage: Credit = Credit(std="one")


class DAPO(PolicyGradient):
    """DAPO (arXiv 2503.14476): a higher upper clip, equal weight for every token, no KL, and groups
    without spread are replaced by new ones. The penalty for long responses is the reward
    `overlong`."""

    name: str = "dapo"
    group: int = Field(16, ge=1)
    surrogate: Surrogate = Clip(low=0.2, high=0.28)
    advantage: Credit = Credit(drop_flat=True)
    refills: int = Field(3, ge=0)


class GSPO(PolicyGradient):
    """GSPO (arXiv 2507.18071): one ratio per response."""

    name: str = "gspo"
    surrogate: Surrogate = SequenceClip()
    aggregation: Mode = "seq-mean-token-mean"


class CISPO(PolicyGradient):
    """CISPO (MiniMax-M1, arXiv 2506.13585): the ratio is a bounded weight, and every token keeps
    its gradient."""

    name: str = "cispo"
    surrogate: Surrogate = Weight()

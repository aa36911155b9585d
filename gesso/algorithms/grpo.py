"""GRPO (arXiv 2402.03300) for models that write, and its relatives that differ in one choice.

The surrogate of `grpo` is EasyR1's, those of the others their papers' or their first codes'. None
has a KL of its own; recipes say where it is and how much.
"""

from __future__ import annotations

from pydantic import Field

from gesso.algorithms.credit import Credit
from gesso.algorithms.policy_gradient import Clip, ReplyAlgorithm, SequenceClip, Surrogate, Weight
from gesso.formulas.aggregation import Mode


class GRPO(ReplyAlgorithm):
    name: str = "grpo"
    surrogate: Surrogate = Clip(low=0.2, high=0.3, dual=3.0)


class DrGRPO(ReplyAlgorithm):
    """Dr.GRPO (arXiv 2503.20783): neither the spread of a group nor the length of a reply weighs
    its gradient."""

    name: str = "dr-grpo"
    aggregation: Mode = "constant"
    advantage: Credit = Credit(std="one")


class DAPO(ReplyAlgorithm):
    """DAPO (arXiv 2503.14476): a wider clip upwards, tokens that count alike, no KL, and no groups
    without spread: others are drawn in their place. Its penalty for long replies is the reward
    `overlong`."""

    name: str = "dapo"
    group: int = Field(16, ge=1)
    surrogate: Surrogate = Clip(low=0.2, high=0.28)
    advantage: Credit = Credit(drop_flat=True)
    refills: int = Field(3, ge=0)


class GSPO(ReplyAlgorithm):
    """GSPO (arXiv 2507.18071): one ratio a reply."""

    name: str = "gspo"
    surrogate: Surrogate = SequenceClip()
    aggregation: Mode = "seq-mean-token-mean"


class CISPO(ReplyAlgorithm):
    """CISPO (MiniMax-M1, arXiv 2506.13585): the ratio is a bounded weight, and no token loses its
    gradient."""

    name: str = "cispo"
    surrogate: Surrogate = Weight()

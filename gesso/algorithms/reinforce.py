"""REINFORCE with one baseline or another: RLOO, REINFORCE++, ReMax."""

from __future__ import annotations

from gesso.algorithms.credit import Credit
from gesso.algorithms.policy_gradient import ReplyAlgorithm


class RLOO(ReplyAlgorithm):
    """RLOO (arXiv 2402.14740): each reply against the mean of the others."""

    name: str = "rloo"
    advantage: Credit = Credit(baseline="others", std="one")


class RLOOTokens(ReplyAlgorithm):
    """RLOO as OpenRLHF and LMM-R1 train it: the advantage, cut at ±10, stands on the last token,
    a KL in the reward is taken off token by token, and the sums are whitened over the batch."""

    name: str = "rloo-tokens"
    advantage: Credit = Credit(baseline="others", std="one", clip=10.0, per="token", whiten=True)


class ReinforcePP(ReplyAlgorithm):
    """REINFORCE++ (arXiv 2501.03262): no baseline but the whitening over the batch."""

    name: str = "reinforce++"
    advantage: Credit = Credit(baseline="zero", std="one", per="token", whiten=True)


class ReinforcePPBaseline(ReinforcePP):
    """The same with the group's mean taken off first."""

    name: str = "reinforce++-baseline"
    advantage: Credit = Credit(std="one", per="token", whiten=True)


class ReMax(ReplyAlgorithm):
    """ReMax (arXiv 2310.10505): each reply against the greedy one to the same prompt."""

    name: str = "remax"
    advantage: Credit = Credit(baseline="greedy", std="one")

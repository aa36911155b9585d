"""REINFORCE with different baselines: RLOO, REINFORCE++, ReMax."""

from __future__ import annotations

from gesso.algorithms.credit import Credit
from gesso.algorithms.policy_gradient import PolicyGradient


class RLOO(PolicyGradient):
    """RLOO (arXiv 2402.14740): each response against the mean of the others."""

    name: str = "rloo"
    advantage: Credit = Credit(baseline="others", std="one")


class RLOOTokens(PolicyGradient):
    """RLOO as in OpenRLHF and LMM-R1: the advantage, clipped to ±10, is that of the last token, a
    KL in the reward is subtracted per token, and the returns are whitened over the batch."""

    name: str = "rloo-tokens"
    advantage: Credit = Credit(baseline="others", std="one", clip=10.0, per="token", whiten=True)


class ReinforcePP(PolicyGradient):
    """REINFORCE++ (arXiv 2501.03262): no baseline except whitening over the batch."""

    name: str = "reinforce++"
    advantage: Credit = Credit(baseline="zero", std="one", per="token", whiten=True)


class ReinforcePPBaseline(ReinforcePP):
    """The same, with the group's mean subtracted first."""

    name: str = "reinforce++-baseline"
    advantage: Credit = Credit(std="one", per="token", whiten=True)


class ReMax(PolicyGradient):
    """ReMax (arXiv 2310.10505): each response against the greedy one to the same prompt."""

    name: str = "remax"
    advantage: Credit = Credit(baseline="greedy", std="one")

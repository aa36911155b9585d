"""SAPO (arXiv 2511.20347): a soft gate instead of a clip."""

from __future__ import annotations

from gesso.algorithms.policy_gradient import Gate, PolicyGradient, Surrogate
from gesso.formulas.aggregation import Mode


class SAPO(PolicyGradient):
    """A gate multiplies the gradient of a token. It falls smoothly as the ratio leaves 1, faster
    for A < 0. The paper and TRL average over the tokens of a response first."""

    name: str = "sapo"
    surrogate: Surrogate = Gate()
    aggregation: Mode = "seq-mean-token-mean"

"""Training with gradients that were computed during sampling: updates run no forward or backward.

If the ratio is 1 and there is no KL term, the loss of a term is linear in its advantage:
∇(−A·ratio) = −A·∇logp. Sampling computes ∇logp of each sample before its reward is known
(`gesso/samplers/one_pass.py`); the update weights these gradients by the advantages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from gesso import config
from gesso.algorithms.base import Terms
from gesso.types import Weights
from gesso.weights.roles import RunnableWeights


@dataclass(frozen=True)
class OnePassTerms(Terms):
    """Samples with the gradients of their summed log-probs, over all trained steps."""

    per_sample_grads: Sequence[Weights]  # N
    advantage: Tensor  # (N,)

    def __len__(self) -> int:
        return self.total

    def micro_batches(self, settings: config.Learner) -> Sequence[Tensor]:
        """One micro-batch: no network is run."""
        return [torch.arange(len(self.per_sample_grads))] if self.per_sample_grads else []

    def rows(self, index: Tensor) -> OnePassTerms:
        grads = [self.per_sample_grads[i] for i in index.tolist()]
        return OnePassTerms(self.total, grads, self.advantage[index])

    def loss(self, policy: RunnableWeights) -> Tensor:
        """−Σ A_i·⟨∇logp_i, θ⟩, which has the gradient of the surrogate at a ratio of 1."""
        grads = self.per_sample_grads
        first, *others = self.advantage.tolist()
        weighted = torch._foreach_mul(list(grads[0].values()), first)  # few, large kernels
        for grad, advantage in zip(grads[1:], others, strict=True):
            torch._foreach_add_(weighted, list(grad.values()), alpha=advantage)
        return -InnerProduct.apply(weighted, *(policy.trainable[name] for name in grads[0]))


class InnerProduct(torch.autograd.Function):
    """⟨w, θ⟩ over lists of tensors. Its gradient is w itself, without slicing a flat vector."""

    @staticmethod
    def forward(ctx: Any, weights: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.weights = weights
        return parameters_to_vector(weights) @ parameters_to_vector(parameters)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *torch._foreach_mul(ctx.weights, grad)


def check_one_pass(name: str, only_the_ratio: bool, updates: int, beta: float) -> None:
    """Raises a ValueError unless every loss of this algorithm is linear in its advantage.

    only_the_ratio: the surrogate is a function of only the ratio and the advantage.
    """
    if not only_the_ratio:
        raise ValueError(
            f"one_pass = true computes gradients at a ratio of 1, but the surrogate of {name} "
            "depends on more than the ratio; remove one_pass, or use flow-grpo"
        )
    if updates != 1:
        raise ValueError(
            "one_pass = true computes gradients with the weights that sample, so a rollout "
            f"allows one optimizer step, got updates = {updates}; set updates = 1"
        )
    if beta > 0:
        raise ValueError(
            "one_pass = true does not support a KL to the reference, got "
            f"beta = {beta:g}; set beta = 0"
        )

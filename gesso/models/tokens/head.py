"""Computes log-probs and entropies from the decoder's states, a few positions at a time: the logits
of all positions, 600 KB each for 152,000 ids, are never in memory together.

    R positions · D width · V ids
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gesso.devices import HAS_TRITON

LOGITS = 80 * 2**20
"""Maximum number of logits in memory: 512 positions of 152,000 ids."""
TILE = 128
"""Positions per tile of a GEMM, of which no part should be empty."""

Scores = tuple[Tensor, Tensor]  # (R,) log-probs, differentiable, and entropies, which are not


def tempered(raw: Tensor, temperature: float, allowed: Tensor) -> Tensor:
    """(n, V) float32 logits, divided by the temperature; ids that are not allowed at −∞."""
    wide = raw.float()
    if temperature not in (0.0, 1.0):
        wide = wide / temperature
    return torch.where(allowed, wide, float("-inf"))


def score(
    head: nn.Module, states: Tensor, tokens: Tensor, temperature: float, allowed: Tensor
) -> Scores:
    """(R, D) states and the (R,) ids that follow them."""
    rows = max(1, LOGITS // len(allowed))
    rows -= rows % TILE if rows > TILE else 0
    if type(head) is nn.Linear and head.bias is None and not head.weight.requires_grad:
        return FrozenHead.apply(states, head, tokens, temperature, allowed, rows)
    parts = [
        checkpoint(_of_head, head, s, t, temperature, allowed, use_reentrant=False)
        if torch.is_grad_enabled()
        else _of_head(head, s, t, temperature, allowed)
        for s, t in zip(states.split(rows), tokens.split(rows), strict=True)
    ]
    logp, entropy = zip(*parts, strict=True)
    return torch.cat(logp), torch.cat(entropy)


def _of_head(
    head: nn.Module, states: Tensor, tokens: Tensor, temperature: float, allowed: Tensor
) -> Scores:
    logp, entropy, _ = scored_by_torch(head(states), tokens, temperature, allowed)
    return logp, entropy


def scored(
    raw: Tensor, tokens: Tensor, temperature: float, allowed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and entropies (n,), and the probabilities (n, V) in the precision of the logits;
    not differentiable on CUDA."""
    if raw.is_cuda and HAS_TRITON:
        from gesso.models.tokens import head_kernels

        return head_kernels.scored(raw, tokens, temperature, allowed)
    if raw.is_meta and raw.dtype != torch.float32:  # a memory estimate, which assumes a GPU
        numbers = raw.new_empty(2, len(raw), dtype=torch.float32)
        return numbers[0], numbers[1], torch.empty_like(raw)
    return scored_by_torch(raw, tokens, temperature, allowed)


def scored_by_torch(
    raw: Tensor, tokens: Tensor, temperature: float, allowed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    logits = tempered(raw, temperature, allowed)
    total = logits.logsumexp(-1)
    logp = logits.gather(-1, tokens[:, None])[:, 0] - total
    shares = (logits.detach() - total.detach()[:, None]).exp()
    entropy = total.detach() - (shares * torch.where(allowed, logits.detach(), 0)).sum(-1)
    return logp, entropy, shares.to(raw.dtype)


class FrozenHead(torch.autograd.Function):
    """Scores of a head that is not trained. Their gradient is computed in forward, up to a factor
    per position: ∂logp/∂state = (W[token] − Σ p W) / temperature. So no tensor of size V is saved,
    and nothing is computed twice."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        head: nn.Linear,
        tokens: Tensor,
        temperature: float,
        allowed: Tensor,
        rows: int,
    ) -> Scores:
        logps, entropies, grads = [], [], []
        for some, ids in zip(states.split(rows), tokens.split(rows), strict=True):
            logp, entropy, shares = scored(head(some), ids, temperature, allowed)
            logps.append(logp)
            entropies.append(entropy)
            if ctx.needs_input_grad[0]:
                grads.append(head.weight[ids] - shares @ head.weight)
        ctx.save_for_backward(*grads)
        ctx.divisor = temperature or 1.0
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logps), entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        logit_grad = torch.cat(ctx.saved_tensors)
        state_grad = (logit_grad * (grad / ctx.divisor)[:, None]).to(logit_grad.dtype)
        return state_grad, None, None, None, None, None

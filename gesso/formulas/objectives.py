"""Policy-gradient objectives over log-probs. All tensors share one shape, one entry per term.

For language models a term is a token, (N, S); an advantage may also be (N, 1). Log-probs must be
finite outside the mask too (for example 0): the weights of `aggregation` are 0 there, but 0·NaN is
NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gesso.formulas.precision import wide

LOG_RATIO = 20.0


@dataclass(frozen=True)
class Surrogate:
    loss: Tensor  # one value per term, to be minimised
    ratio: Tensor  # detached
    clipped: Tensor  # bool: clipped or masked, so the term has no gradient


def clipped(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, low: float, high: float
) -> Surrogate:
    """PPO's clip: max(−A·r, −A·clip(r, 1−low, 1+high)), r = exp(logp − old_logp)."""
    return _clip(logp - old_logp, advantage, low, high)


def token_clipped(
    logp: Tensor,
    old_logp: Tensor,
    advantage: Tensor,
    low: float,
    high: float,
    dual: float | None = None,
) -> Surrogate:
    """PPO's clip (arXiv 1707.06347) for tokens: max(−A·ρ, −A·clip(ρ, 1−low, 1+high)),
    ρ = exp(ℓ − ℓ_old); low ≠ high is DAPO's clip-higher (2503.14476). With `dual` = c > 1 the loss
    of a term with A < 0 is at most c·|A| (dual clip, 1912.09729): ρ has no other bound on that
    side.

    Departure, as in verl: log ρ is clamped to ±20, so that no loss is infinite; a token beyond
    that range has no gradient and counts as clipped.
    """
    return _token_clip(wide(logp) - wide(old_logp).detach(), advantage, low, high, dual)


def sequence_clipped(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, low: float, high: float
) -> Surrogate:
    """GSPO (arXiv 2507.18071), in its token form, eq. 14: PPO's clip of one ratio per sequence,
    s = exp(mean over the response of ℓ − ℓ_old), applied to each token as sg[s]·exp(ℓ − sg[ℓ]).

    Its value is s and its gradient s·∇ℓ, so each token may have a separate advantage; with one
    advantage per sequence and "seq-mean-token-mean" the gradient is that of clip(s)·A, GSPO's
    eq. 5. A mean varies less than single tokens: the authors use low = 3e-4 and high = 4e-4.
    Outside the mask the ratio is 1. log s is clamped to ±20 (verl: to 10, and each token too).
    """
    logp = wide(logp)
    log_ratio = torch.where(mask, logp - wide(old_logp), 0.0).detach()
    mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True)  # (N, 1)
    each = torch.where(mask, mean + (logp - logp.detach()), 0.0)
    return _token_clip(each, advantage, low, high, None)


def cispo(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, lower: float, upper: float
) -> Surrogate:
    """CISPO (MiniMax-M1, arXiv 2506.13585), eq. 4: −sg[clip(ρ, lower, upper)]·A·ℓ. The weight is
    bounded and every token keeps its gradient, −weight·A: none counts as clipped; `ratio` shows
    how many weights are at a bound. log ρ is clamped to ±20.

    The bounds are values of ρ itself. The paper writes 1 − ε and 1 + ε; some codes take ε and
    others the bound, under the same name. "No lower bound", the authors' setting, is lower = 0.
    """
    logp = wide(logp)
    log_ratio = (logp - wide(old_logp)).detach().clamp(-LOG_RATIO, LOG_RATIO)
    ratio = log_ratio.exp()
    loss = -ratio.clamp(lower, upper) * advantage * logp
    return Surrogate(loss, ratio, torch.zeros_like(loss, dtype=torch.bool))


def sapo(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, tau_pos: float, tau_neg: float
) -> Surrogate:
    """SAPO (arXiv 2511.20347): −A·(4/τ)·σ(τ(ρ − 1)), τ = tau_pos for A > 0, else tau_neg. The
    gradient with respect to ℓ is −A·4σ(1 − σ)·ρ: −A at ρ = 1. The factor 4σ(1 − σ), the
    gate, is 1 there and falls smoothly on both sides; with ρ, the gradient is largest near ρ = 2.
    The value at ρ = 1 is −2A/τ, a constant that has no gradient.

    As in `token_clipped`, log ρ is clamped to ±20, and a token counts as clipped if it has no
    gradient: beyond that range, or where σ rounds to 1 (in float32 at ρ of about 18).
    """
    log_ratio = wide(logp) - wide(old_logp).detach()
    ratio = log_ratio.clamp(-LOG_RATIO, LOG_RATIO).exp()
    tau = torch.full_like(ratio, tau_neg).masked_fill(advantage > 0, tau_pos)
    gate = torch.sigmoid(tau * (ratio - 1))
    closed = (gate == 1) | (log_ratio.abs() > LOG_RATIO)
    return Surrogate(-advantage * 4 / tau * gate, ratio.detach(), closed & (advantage != 0))


@dataclass(frozen=True)
class Importance:
    """Weights exp(ℓ_learner − ℓ_sampler). They multiply the loss of a token if the sampler (another
    engine, another precision) sampled from a policy that differs slightly from the learner's. Both
    log-probs are of the weights before the update."""

    weight: Tensor  # (N, S), without gradient
    bounded: Tensor  # (N, S) bool: truncated or masked


def token_truncated(learner_logp: Tensor, sampler_logp: Tensor, cap: float) -> Importance:
    """min(weight, cap) (Ionides 2008). The cap, usually 2, bounds the variance, at the cost of a
    bias against tokens that the sampler samples too rarely."""
    weight = _weight(learner_logp, sampler_logp)
    return Importance(weight.clamp(max=cap), weight > cap)


def token_masked(learner_logp: Tensor, sampler_logp: Tensor, cap: float) -> Importance:
    """0 for weights outside [1/cap, cap], as IcePop does (its bounds are .5 and 5)."""
    weight = _weight(learner_logp, sampler_logp)
    outside = (weight > cap) | (weight < 1 / cap)
    return Importance(torch.where(outside, 0.0, weight), outside)


def sequence_masked(
    learner_logp: Tensor, sampler_logp: Tensor, mask: Tensor, cap: float, mean_cap: float
) -> Importance:
    """0 for all tokens of a response for which the geometric mean of the weights is outside
    [1/mean_cap, mean_cap]; the others as in `token_truncated`. Both sides are masked: tokens come
    from the sampler, so that the mean of ℓ_learner − ℓ_sampler is −KL where the policies differ.

    TRL masks by the product of the weights, which grows with the length: rounding alone would mask
    long responses. NeMo-RL uses the geometric mean, too, but does not truncate the weights.
    """
    truncated = token_truncated(learner_logp, sampler_logp, cap)
    log_weight = torch.where(mask, wide(learner_logp) - wide(sampler_logp), 0.0).detach()
    mean = log_weight.sum(1, keepdim=True) / mask.sum(1, keepdim=True)  # (N, 1)
    outside = mean.abs() > math.log(mean_cap)
    return Importance(torch.where(outside, 0.0, truncated.weight), truncated.bounded | outside)


def _weight(learner_logp: Tensor, sampler_logp: Tensor) -> Tensor:
    return torch.exp(wide(learner_logp) - wide(sampler_logp)).detach()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """PPO's value loss, one per token: ½·max((v − R)², (clip(v, v_old − c, v_old + c) − R)²).
    A value that moved by more than c and is closer to its return than the clipped value has no
    gradient; one that moved away keeps its gradient. clip None: ½(v − R)²."""
    values, returns = wide(values), returns.detach()
    error = (values - returns).square()
    if clip is not None:
        old = wide(old_values).detach()
        clipped_values = old + (values - old).clamp(-clip, clip)
        error = torch.maximum(error, (clipped_values - returns).square())
    return 0.5 * error


def guarded(
    logp: Tensor,
    old_logp: Tensor,
    advantage: Tensor,
    divergence: Tensor,
    std: Tensor,
    clip: float,
) -> Surrogate:
    """GRPO-Guard (arXiv 2510.22319): PPO's clip of r = exp((logp − old_logp + b)·c), where c is the
    step's standard deviation and b = mean (μ−μ_old)²/2c², the `divergence` of the term.

    On a Gaussian step r = exp(mean ε·(μ−μ_old)): its logarithm has mean 0 and the same scale at
    every noise level, so that one clip range suits all steps. The reference code averages b over
    the whole batch by mistake (confirmed by its author); here b is computed per term.
    """
    return clipped(
        (logp - old_logp + divergence) * std, torch.zeros_like(logp), advantage, clip, clip
    )


def masked(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, divergence: Tensor, limit: float
) -> Surrogate:
    """Flow-DPPO: −A·r, but a term whose step has moved by `divergence` ≥ limit and would be pushed
    further (r > 1 with A > 0, or r < 1 with A < 0) has no gradient."""
    ratio = torch.exp(logp - old_logp)
    further = ((ratio > 1) & (advantage > 0)) | ((ratio < 1) & (advantage < 0))
    dropped = (further & (divergence >= limit)).detach()
    loss = torch.where(dropped, (-advantage * ratio).detach(), -advantage * ratio)
    return Surrogate(loss, ratio.detach(), dropped)


def _token_clip(
    log_ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None
) -> Surrogate:
    surrogate = _clip(log_ratio.clamp(-LOG_RATIO, LOG_RATIO), advantage, low, high)
    beyond = (log_ratio.detach().abs() > LOG_RATIO) & (advantage != 0)
    loss, dropped = surrogate.loss, surrogate.clipped | beyond
    if dual is not None:
        capped = (advantage < 0) & (surrogate.ratio > dual)
        loss, dropped = torch.where(capped, -advantage * dual, loss), dropped | capped
    return Surrogate(loss, surrogate.ratio, dropped)


def _clip(log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> Surrogate:
    ratio = torch.exp(log_ratio)
    free = -advantage * ratio
    bound = -advantage * ratio.clamp(1 - low, 1 + high)
    return Surrogate(torch.maximum(free, bound), ratio.detach(), (bound > free).detach())


def teacher_gap(teacher: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """On-policy distillation: ℓ_T − ℓ_old of every token, (N, S) float64, 0 outside the mask. Its
    negative is an unbiased estimate of the reverse KL, and as an advantage it has the gradient of
    that. It is not standardised: a teacher that equals the student would become noise."""
    return torch.where(mask, teacher.double() - old.double(), 0.0).detach()

"""Checks that both sides of flow_iteration.py compute the same."""

from __future__ import annotations

from typing import Any

import torch
from flow_plain import Batch
from flow_sides import Ours, Theirs, advantages
from torch import Tensor

from gesso import config
from gesso.algorithms.base import Prepared
from gesso.algorithms.flow_grpo import FlowGRPO, StepTerms
from gesso.rollout import Rollout
from gesso.traces.flow import FlowContext, FlowTrace
from gesso.types import Size
from gesso.weights.policy import Policy


def relative(value: Tensor, truth: Tensor) -> float:
    return float((value - truth).norm() / truth.norm())


def prove(ours: Ours, theirs: Theirs, images: int = 2) -> dict[str, tuple[float, float]]:
    """Name → error of ours and of the plain side against float32, for latents, log-probs and
    gradients. The plain side's error is the reference: the loss of half precision itself."""
    proof: dict[str, tuple[float, float]] = {}
    plain = theirs.plain
    plain.reset()
    ours.model.policy.load(ours.start)
    for gradient in ("both", "conditional"):
        algorithm = FlowGRPO(
            beta=0.0, group=max(images, 2), updates=1, guidance_gradient=gradient, clip=1e3
        )
        half, plain.dtype = plain.dtype, None
        truth = theirs.sample(algorithm, images, exact=True)
        logp, slope = their_replay(theirs, truth, algorithm, images)
        plain.dtype = half
        mine = our_replay(ours, theirs, truth, algorithm)
        yours = their_replay(theirs, truth, algorithm, images)
        if gradient == "both":
            end = truth.latents[-1]
            drawn = ours.sample(algorithm, images).flow_trace.clean
            apart = relative(theirs.sample(algorithm, images, True).latents[-1], end)
            proof["latents at the end"] = (relative(drawn, end), apart)
            gaps = [float((replayed[0] - logp).abs().max()) for replayed in (mine, yours)]
            proof["log-probs, largest"] = (gaps[0], gaps[1])
        proof[f"gradient, {gradient}"] = (relative(mine[1], slope), relative(yours[1], slope))
    proof["gradient, one pass"] = in_one_pass(ours, theirs, images)
    return proof


def in_one_pass(ours: Ours, theirs: Theirs, images: int) -> tuple[float, float]:
    """Error of the gradient computed during sampling against float32 on the same path, and of the
    plain side's."""
    algorithm = FlowGRPO(beta=0.0, group=max(images, 2), updates=1, one_pass=True)
    rollout = ours.sample(algorithm, images)
    terms = algorithm.terms(rollout, Prepared(advantages(images)))
    (algorithm.loss(ours.model, terms).loss.sum() / terms.total).backward()
    mine = taken(ours.model.policy)
    trace, row = rollout.flow_trace, rollout.flow_trace.row
    logps = dict(enumerate(rollout.logp.unbind(1)))
    steps = list(trace.latents.unbind(1))
    negative = None if theirs.negative is None else theirs.negative.rows(row)
    path = Batch(theirs.cond.rows(row), negative, steps, logps, torch.empty(0))
    half, theirs.plain.dtype = theirs.plain.dtype, None
    _, truth = their_replay(theirs, path, algorithm, images)
    theirs.plain.dtype = half
    _, yours = their_replay(theirs, path, algorithm, images)
    return relative(mine, truth), relative(yours, truth)


def their_replay(
    theirs: Theirs, batch: Batch, algorithm: FlowGRPO, images: int
) -> tuple[Tensor, Tensor]:
    """Log-probs (N, S) of given latents, and the gradient of the loss."""
    plain, sigmas = theirs.plain, theirs.sigmas(algorithm.steps)
    advantage = advantages(images).to(plain.device)
    plain.reset()
    logps = []
    for i in range(algorithm.terms_a_sample):
        step = plain._transition(batch, algorithm, i, sigmas)
        logps.append(step.logp(batch.latents[i + 1]))
        ratio = torch.exp(logps[-1] - batch.logp[i])
        (-(advantage * ratio).mean() / algorithm.terms_a_sample).backward()
    names = {id(p): n for n, p in plain.network.named_parameters()}
    trained = [p for p in plain.trained if p.grad is not None]  # not those of the last text layers
    grads = sorted((names[id(p)], p.grad.flatten()) for p in trained)
    plain.optimizer.zero_grad()
    return torch.stack([t.detach() for t in logps], 1), torch.cat([g for _, g in grads])


def our_replay(
    ours: Ours, theirs: Theirs, batch: Batch, algorithm: FlowGRPO
) -> tuple[Tensor, Tensor]:
    model, images, steps = ours.model, len(batch.latents[0]), algorithm.terms_a_sample
    model.policy.load(ours.start)
    size = Size(ours.shape.size, ours.shape.size)
    sigmas = model.sigmas(algorithm.steps, *size).to(model.device)
    context = FlowContext(sigmas, theirs.cond, theirs.negative)
    latents = torch.stack(batch.latents[: steps + 1], 1)
    row = torch.zeros(images, dtype=torch.long, device=model.device)
    index = torch.arange(steps, device=model.device).repeat(images, 1)
    trace = FlowTrace(context, row, index, latents, latents[:, :0], batch.latents[-1])
    old = torch.stack([batch.logp[i] for i in range(steps)], 1)
    nobody: Any = [None] * images
    rollout = Rollout(nobody, row.cpu(), trace, old, 0, nobody, {})
    terms = algorithm.terms(rollout, Prepared(advantages(images)))
    assert isinstance(terms, StepTerms)
    logps = []
    with model.policy.folded():
        for index in terms.micro_batches(config.Learner(micro_batch=ours.shape.images)):
            part = terms.rows(index)
            with torch.no_grad():
                logps.append(algorithm.transition(model, part, "current").logp(part.x_next))
            (algorithm.loss(model, part).loss.sum() / terms.total).backward()
    return torch.cat(logps).view(images, steps), taken(model.policy)


def taken(policy: Policy) -> Tensor:
    """Returns the gradient and clears it."""
    grads = sorted((n, p.grad.flatten()) for n, p in policy.trainable.items() if p.grad is not None)
    for p in policy.trainable.values():
        p.grad = None
    return torch.cat([g for _, g in grads])

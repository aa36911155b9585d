"""`gesso check`: everything a run needs, tried once, before the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gesso.config import Recipe
from gesso.run import Job, assemble
from gesso.types import Rollout, UserError


@dataclass
class Findings:
    facts: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def fact(self, name: str, text: str) -> None:
        self.facts.append((name, text))


@dataclass(frozen=True)
class Trial:
    """What one forward and backward pass of a micro-batch told."""

    terms_a_sample: float
    activations: int  # bytes a term, kept for the backward pass
    seconds: float  # a term


def check(recipe: Recipe) -> Findings:
    """Raises a UserError at the first thing that would stop the run."""
    found = Findings()
    job = assemble(recipe)
    try:
        found.warnings += job.notes
        prompts = len(job.cluster.stream.prompts)
        found.fact("data", f"{prompts} training prompts, {len(job.eval_prompts)} held-out")
        policy = job.learner.policy
        size = sum(p.numel() for p in policy.module.parameters())
        found.fact(
            "model",
            f"{recipe.model.path}: {size:,} parameters in the transformer, "
            f"{policy.size:,} trained, on {job.model.device}",
        )
        rollout, seconds = _small_batch(job)
        _rewards(rollout, found)
        _ratio(job, replay_gap(job, rollout), found)
        trial = _trial_update(job, rollout)
        _memory(job, trial, found)
        _time(job, trial, seconds, found)
    finally:
        job.close()
    return found


def _small_batch(job: Job) -> tuple[Rollout, float]:
    """One batch of the sampler drawn as training would, one sample a prompt, and seconds per
    sample. Drawn twice: the first also pays for loading and encoding."""
    job.cluster.draw(0, groups=job.recipe.sampler.batch, group=1).result()
    rollout, timing = job.cluster.draw(0, groups=job.recipe.sampler.batch, group=1).result()
    return rollout, timing.sample / len(rollout.samples)


def _rewards(rollout: Rollout, found: Findings) -> None:
    for score, sample in zip(rollout.scores, rollout.samples, strict=True):
        if score.error is not None:
            raise UserError(f"a reward failed on {sample.prompt.text!r}: {score.error}")
    example, prompt = rollout.scores[0], rollout.samples[0].prompt.text
    parts = ", ".join(f"{name} {value:.3g}" for name, value in example.parts.items())
    found.fact("rewards", f"all answered; {prompt!r} scored {parts}")


def replay_gap(job: Job, rollout: Rollout) -> float | None:
    """Largest |Δ log-prob| between drawing a step and scoring it again with the same weights: the
    noise floor of the ratio. None for an algorithm without log-probs."""
    if rollout.logp.shape[1] == 0:
        return None
    size = job.recipe.learner.micro_batch
    with torch.no_grad():
        terms = job.algorithm.terms(rollout, torch.ones(len(rollout.samples)), torch.Generator())
        gaps = [
            job.algorithm.loss(job.model, terms.rows(slice(at, at + size))).stats["abs_dlogp"]
            for at in range(0, len(terms), size)
        ]
    return float(torch.cat(gaps).max())


def _ratio(job: Job, gap: float | None, found: Findings) -> None:
    if gap is None:
        found.fact("ratio", "not used by this algorithm")
        return
    found.fact("ratio", f"replay differs from sampling by at most {gap:.1e}")
    clip = job.algorithm.clip_range
    if clip is not None and clip < gap:
        found.warnings.append(
            f"algorithm.clip = {clip:g} lies under the noise floor of the ratio, {gap:.1e}: "
            "rounding alone clips; raise clip or use float32"
        )


@contextmanager
def _saved_for_backward() -> Iterator[dict[int, int]]:
    """Bytes of every distinct storage that autograd keeps for the backward pass."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def _trial_update(job: Job, rollout: Rollout) -> Trial:
    generator = torch.Generator().manual_seed(0)
    terms = job.algorithm.terms(rollout, torch.ones(len(rollout.samples)), generator)
    terms_a_sample = terms.total / len(rollout.samples)
    terms = terms.rows(slice(0, job.recipe.learner.micro_batch))
    own = {p.data_ptr() for p in job.learner.policy.module.parameters()}
    with _saved_for_backward() as kept:
        job.algorithm.loss(job.model, terms).loss.sum().backward()
    activations = sum(size for pointer, size in kept.items() if pointer not in own)
    started = time.perf_counter()
    job.algorithm.loss(job.model, terms).loss.sum().backward()
    seconds = time.perf_counter() - started
    job.learner.optimizer.zero_grad(set_to_none=True)
    return Trial(terms_a_sample, activations // len(terms), seconds / len(terms))


def _memory(job: Job, trial: Trial, found: Findings) -> None:
    policy = job.learner.policy
    trained = sum(p.nbytes for p in policy.trained.values())
    parts = {
        "weights": sum(p.nbytes for p in policy.module.parameters()),
        "gradients": trained,
        "optimizer": 2 * trained,
        "copies": len(policy.copies) * trained,
        "activations": trial.activations * job.recipe.learner.micro_batch,
    }
    listed = ", ".join(f"{name} {_mb(size)}" for name, size in parts.items() if size)
    found.fact("memory", f"about {_mb(sum(parts.values()))} for training: {listed}")


def _time(job: Job, trial: Trial, sampling: float, found: Findings) -> None:
    recipe = job.recipe
    samples = recipe.data.groups * job.algorithm.group
    step = samples * (sampling + trial.terms_a_sample * trial.seconds)
    spec = job.algorithm.spec(0, 0, recipe.model.height, recipe.model.width)
    evaluation = len(job.eval_prompts) * sampling * recipe.eval.steps / spec.steps
    evaluations = 2 + (recipe.steps - 1) // recipe.eval.every if recipe.eval.every else 2
    total = recipe.steps * step + evaluations * evaluation
    found.fact(
        "time",
        f"about {_duration(step)} a step, {_duration(total)} in all on this machine, "
        "if scoring keeps up with sampling",
    )


def _mb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

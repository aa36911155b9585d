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


def check(recipe: Recipe) -> Findings:
    """Raises a UserError at the first thing that would stop the run."""
    found = Findings()
    job = assemble(recipe)
    try:
        found.warnings += job.notes
        found.facts.append(
            (
                "data",
                f"{len(job.cluster.stream.prompts)} training prompts, "
                f"{len(job.eval_prompts)} held-out",
            )
        )
        size = sum(p.numel() for p in job.learner.policy.module.parameters())
        found.facts.append(
            (
                "model",
                f"{recipe.model.path}: {size:,} parameters in the transformer, "
                f"{job.learner.policy.size:,} trained, on {job.model.device}",
            )
        )
        rollout, sampling = _small_batch(job)
        _rewards(job, rollout, found)
        gap = replay_gap(job, rollout)
        _ratio(recipe, job, gap, found)
        activations, updating = _trial_update(job, rollout)
        _estimates(recipe, job, activations, sampling, updating, found)
    finally:
        job.close()
    return found


def _small_batch(job: Job) -> tuple[Rollout, float]:
    """One batch of the sampler drawn as training would, one sample a prompt, and seconds per
    sample."""
    groups = job.recipe.sampler.batch
    small = job.recipe.model_copy(
        update={"data": job.recipe.data.model_copy(update={"groups": groups})}
    )
    cluster = job.cluster
    one_each = type(cluster)(
        small,
        job.algorithm.model_copy(update={"group": 1}),  # type: ignore[attr-defined]
        cluster.sampler,
        cluster.rewards,
        cluster.stream,
    )
    one_each.collect(0).result()  # the first batch also pays for loading and encoding
    rollout, timing = one_each.collect(0).result()
    return rollout, timing.sample / len(rollout.samples)


def _rewards(job: Job, rollout: Rollout, found: Findings) -> None:
    for score, sample in zip(rollout.scores, rollout.samples, strict=True):
        if score.error is not None:
            raise UserError(f"a reward failed on {sample.prompt.text!r}: {score.error}")
    example, prompt = rollout.scores[0], rollout.samples[0].prompt.text
    parts = ", ".join(f"{name} {value:.3g}" for name, value in example.parts.items())
    found.facts.append(("rewards", f"all answered; {prompt!r} scored {parts}"))


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


def _ratio(recipe: Recipe, job: Job, gap: float | None, found: Findings) -> None:
    if gap is None:
        found.facts.append(("ratio", "not used by this algorithm"))
        return
    found.facts.append(("ratio", f"replay differs from sampling by at most {gap:.1e}"))
    clip = recipe.algorithm.options.get("clip")
    if isinstance(clip, float) and clip < gap:
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


def _trial_update(job: Job, rollout: Rollout) -> tuple[int, float]:
    """Bytes of activations per term and seconds per term of one forward and backward pass."""
    generator = torch.Generator().manual_seed(0)
    terms = job.algorithm.terms(rollout, torch.ones(len(rollout.samples)), generator)
    terms = terms.rows(slice(0, job.recipe.learner.micro_batch))
    own = {p.data_ptr() for p in job.learner.policy.module.parameters()}
    with _saved_for_backward() as kept:
        loss = job.algorithm.loss(job.model, terms).loss.sum()
    started = time.perf_counter()
    job.algorithm.loss(job.model, terms).loss.sum().backward()
    seconds = time.perf_counter() - started
    loss.backward()
    job.learner.optimizer.zero_grad(set_to_none=True)
    activations = sum(size for pointer, size in kept.items() if pointer not in own)
    return activations // len(terms), seconds / len(terms)


def _estimates(
    recipe: Recipe, job: Job, activations: int, sampling: float, updating: float, found: Findings
) -> None:
    policy = job.learner.policy
    weights = sum(p.numel() * p.element_size() for p in policy.module.parameters())
    trained = sum(p.numel() * 4 for p in policy.trained.values())
    copies = len(policy.copies) * trained
    held = activations * recipe.learner.micro_batch
    parts = {
        "weights": weights,
        "gradients": trained,
        "optimizer": 2 * trained,
        "copies": copies,
        "activations": held,
    }
    listed = ", ".join(f"{name} {_mb(size)}" for name, size in parts.items() if size)
    found.facts.append(("memory", f"about {_mb(sum(parts.values()))} for training: {listed}"))
    samples = recipe.data.groups * job.algorithm.group
    spec = job.algorithm.spec(0, recipe.model.height, recipe.model.width)
    per_sample = len(spec.trained) or recipe.algorithm.options["times"]
    step = samples * (sampling + per_sample * updating)
    share = recipe.eval.steps / spec.steps * sampling * len(job.eval_prompts)
    evals = 2 + (recipe.steps - 1) // recipe.eval.every if recipe.eval.every else 2
    total = recipe.steps * step + evals * share
    found.facts.append(
        (
            "time",
            f"about {_duration(step)} a step, {_duration(total)} in all on this machine, "
            "with scoring hidden behind sampling",
        )
    )


def _mb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

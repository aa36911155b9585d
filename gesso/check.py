"""`gesso check`: runs everything that a training run needs once, before the run."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gesso import build, families
from gesso.algorithms.base import Terms
from gesso.cluster.placement import Placement, place
from gesso.config import Cluster, Recipe
from gesso.estimate import Assumed, Memory, assuming, estimates, with_data
from gesso.health import under_floor
from gesso.health.rows import replayed
from gesso.memory.meta import Role
from gesso.models.repeatable import deterministic_algorithms, kernel_options
from gesso.ranks import ALONE
from gesso.rollout import Rollout
from gesso.run import Assembled, assemble
from gesso.track.progress import SILENT, Progress
from gesso.types import UNSCALED, Sample, Score, UserError, Which


@dataclass
class Findings:
    facts: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def fact(self, name: str, text: str) -> None:
        self.facts.append((name, text))


def check(recipe: Recipe, progress: Progress = SILENT) -> Findings:
    """Raises a UserError at the first thing that would stop the run."""
    findings, family = Findings(), families.of(recipe)
    placement = place(recipe, build.algorithm(recipe))
    if placement is not None and (recipe.cluster.sharding or placement.parallel > 1):
        return _check_in_workers(recipe, placement, progress)
    alone = recipe.model_copy(update={"cluster": Cluster()})  # each worker does the same
    threads = torch.get_num_threads()
    job = assemble(alone, progress)
    job.rewards.service.fail_early()
    try:
        if placement is not None:
            torch.set_num_threads(placement.threads)
        findings.warnings += job.notes
        if placement is not None:
            findings.fact("workers", str(placement))
        findings.fact("data", _data(job))
        policy = job.learner.policy
        size = sum(p.numel() for p in policy.module.parameters())
        findings.fact(
            "model",
            f"{recipe.model.path}: {size:,} parameters in the {family.network(job.model)}, "
            f"{policy.size:,} trained, on {job.model.device}",
        )
        rollout, seconds = _small_batch(job)
        evaluating = _scores(job, rollout, findings)
        progress.phase("comparing replay with sampling")
        _ratio(job, replay_gap(job, rollout), findings)
        progress.phase("running a trial update")
        seconds_per_term, repeatable = _trial_update(job, rollout)
        findings.fact("repeats", _repeats(job, repeatable))
        progress.phase("estimating memory")
        if family.wraps_library(job.model):
            findings.facts += _memory(assuming(recipe, job.largest))
        else:
            findings.fact(
                "memory", "not estimated: the model is neither from diffusers nor transformers"
            )
        _measured(job, findings)
        # Workers take parts of a batch in turns.
        sampled, trained = (1.0, 1.0) if placement is None else _shares(placement)
        updating = job.algorithm.terms_a_sample * seconds_per_term
        evaluating = sampled * evaluating if evaluating is not None else None
        findings.fact("time", _time(job, sampled * seconds, trained * updating, evaluating))
    finally:
        torch.set_num_threads(threads)
        job.close()
    return findings


def _shares(placement: Placement) -> tuple[float, float]:
    """Shares of a step's samples on the busiest worker: to sample, and to train on."""
    samplers = placement.samplers or placement.workers
    learners = placement.workers - placement.samplers
    sampled, trained = (math.ceil(placement.parts / n) for n in (samplers, learners))
    slower = 1.0 if placement.gpus or placement.on_ray else max(1.0, _threads_per_core(placement))
    return slower * sampled / placement.parts, slower * trained / placement.parts


def _threads_per_core(placement: Placement) -> float:
    return placement.workers * placement.threads / (os.cpu_count() or 1)


def _check_in_workers(recipe: Recipe, placement: Placement, progress: Progress) -> Findings:
    """Two small steps of all workers: one of them alone could not hold the model. The first step
    includes compilation."""
    findings = Findings([("workers", str(placement))])
    job = assemble(recipe, progress)
    job.rewards.service.fail_early()
    try:
        findings.warnings += [note for note in job.notes if note != str(placement)]
        findings.fact("data", _data(job))
        group, evaluating = job.algorithm.group, None
        groups = math.ceil(placement.workers * recipe.sampler.batch / group)
        for step in range(2):
            rollout, timing = job.cluster.sample_step(step, groups, group).result()
            if step == 0:
                evaluating = _scores(job, rollout, findings)
            progress.phase("running a trial update")
            started = time.perf_counter()
            metrics = job.cluster.train(rollout, step, UNSCALED).metrics
            updating = time.perf_counter() - started
            if step == 0:
                _ratio(job, replayed(metrics)[0], findings)
                job.cluster.publish(1)
        progress.phase("estimating memory")
        findings.facts += _memory(assuming(recipe, job.largest))
        if placement.gpus:
            findings.fact("", f"measured: {size_of(1e9 * metrics['memory/gb'])} in the largest")
        samples = len(rollout.samples)
        findings.fact("time", _time(job, timing.sample / samples, updating / samples, evaluating))
    finally:
        job.close()
    return findings


def _data(job: Assembled) -> str:
    prompts = len(job.cluster.stream.prompts)
    return f"{prompts} training prompts, {len(job.eval_prompts)} held-out"


def _small_batch(job: Assembled) -> tuple[Rollout, float]:
    """One sampler batch, sampled as in training with one sample per prompt, or with whole groups
    for rewards that compare them, and the seconds per sample. Sampled twice: the first time
    includes loading and encoding."""
    samples = min(job.recipe.sampler.batch, job.recipe.data.groups * job.algorithm.group)
    group = job.algorithm.group if job.cluster.rewards.groupwise() else 1
    groups = math.ceil(samples / group)
    job.local.sample_step(0, groups, group).result()
    rollout, timing = job.local.sample_step(0, groups, group).result()
    return rollout, timing.sample / len(rollout.samples)


def _scores(job: Assembled, rollout: Rollout, findings: Findings) -> float | None:
    """Checks the rewards of training and of evaluations. Returns the seconds per sample of an
    evaluation if they do not follow from those of training."""
    if job.recipe.sampler.engine == "data":
        return _evaluation(job, findings)
    _rewards(rollout.samples, rollout.scores, findings)
    _held_out(job, findings)
    return None


def _held_out(job: Assembled, findings: Findings) -> None:
    """The rewards of evaluations, if they differ, on one held-out prompt."""
    if not job.recipe.eval_reward:
        return
    which: Which = "ema" if job.recipe.learner.ema else "current"
    _, (score, *_) = job.cluster.evaluate(job.eval_prompts[:1], which)
    if score.error is not None:
        raise UserError(f"eval_reward: {score.error}; make it available, or use another reward")
    parts = ", ".join(f"{name} {value:.3g}" for name, value in score.parts.items())
    findings.fact("", f"in evaluations: {parts}")


def _evaluation(job: Assembled, findings: Findings) -> float:
    """A small evaluation: the only samples that a run on given data generates and scores. Returns
    the seconds per sample; sampled twice, as in `_small_batch`."""
    prompts = job.eval_prompts[: job.recipe.sampler.batch]
    for _ in range(2):
        started = time.perf_counter()
        samples, scores = job.cluster.evaluate(prompts, "current")
        seconds = time.perf_counter() - started
    _rewards(samples, scores, findings)
    return seconds / len(samples)


def _rewards(samples: Sequence[Sample], scores: Sequence[Score], findings: Findings) -> None:
    for score, sample in zip(scores, samples, strict=True):
        if score.error is not None:
            raise UserError(f"a reward failed on {sample.prompt.text[:60]!r}: {score.error}")
    example, prompt = scores[0], samples[0].prompt.text[:60]
    parts = ", ".join(f"{name} {value:.3g}" for name, value in example.parts.items())
    findings.fact("rewards", f"no failures; example: {prompt!r} scored {parts}")


def replay_gap(job: Assembled, rollout: Rollout) -> float | None:
    """Largest |Δ log-prob| between sampling a step and replaying it with the same weights: the
    noise floor of the ratio. None for an algorithm that has no log-probs or does not recompute
    them."""
    if rollout.logp.shape[1] == 0:
        return None
    terms = _completed(job, _terms(job, rollout))
    with torch.no_grad(), job.learner.policy.folded():
        stats = [
            job.algorithm.loss(job.model, terms.rows(index)).stats
            for index in terms.micro_batches(job.recipe.learner)
        ]
    for name in ("sampler_gap", "abs_dlogp"):  # the first with `algorithm.importance`
        if all(name in part for part in stats):
            return float(torch.cat([part[name] for part in stats]).max())
    return None


def _terms(job: Assembled, rollout: Rollout) -> Terms:
    """The terms of the rollout with every advantage set to 1."""
    prepared = job.algorithm.prepare(job.model, rollout, job.recipe.learner)
    equal = replace(prepared, advantages=torch.ones_like(prepared.advantages))
    return job.algorithm.terms(rollout, equal)


def _completed(job: Assembled, terms: Terms) -> Terms:
    return job.algorithm.complete(job.model, terms, job.recipe.learner, ALONE)


def _ratio(job: Assembled, gap: float | None, findings: Findings) -> None:
    if gap is None:
        findings.fact("ratio", "not used by this algorithm")
        return
    findings.fact("ratio", f"log-probs of sampling and replay differ by at most {gap:.1e}")
    clip = job.algorithm.clip_range
    if clip is not None and clip < gap and families.of(job.recipe).tight_clip:
        findings.warnings.append(under_floor(clip, gap))


def _trial_update(job: Assembled, rollout: Rollout) -> tuple[float, bool]:
    """Seconds per term for the forward and backward pass of one micro-batch, and whether a second
    pass gives the same gradient."""
    terms = _terms(job, rollout)
    terms = terms.rows(terms.micro_batches(job.recipe.learner)[0])
    gradients = []
    with job.learner.policy.folded(), deterministic_algorithms(job.model):
        for _ in range(2):  # the first one includes compilation
            started = time.perf_counter()
            completed = _completed(job, terms)
            job.algorithm.loss(job.model, completed).loss.sum().backward()
            _wait(job)
            seconds = time.perf_counter() - started
            gradients.append(_bits(job.learner.policy.trainable))
            job.learner.optimizer.zero_grad(set_to_none=True)
    return seconds / len(terms), gradients[0] == gradients[1]


def _bits(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """A checksum of every gradient, which are float32."""
    return {
        name: int(parameter.grad.view(torch.int32).sum(dtype=torch.int64))
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }


def _repeats(job: Assembled, equal_gradients: bool) -> str:
    if job.recipe.sampler.engine == "vllm":
        return "no: vLLM does not promise equal samples"
    if not equal_gradients:
        return "no: two backward passes over the same samples gave different gradients"
    if job.model.device.type == "cuda" and not kernel_options():
        return f"no: torch {torch.__version__} chooses compiled kernels by timing them"
    return "yes, to the bit, on the same kind of device with the same versions"


def _wait(job: Assembled) -> None:
    if job.model.device.type == "cuda":
        torch.cuda.synchronize(job.model.device)


def _measured(job: Assembled, findings: Findings) -> None:
    """On CUDA, the measured peak of the trial plus the optimizer state, which it did not
    allocate."""
    if job.model.device.type == "cuda":
        state = 2 * sum(p.nbytes for p in job.learner.policy.trainable.values())
        peak = torch.cuda.max_memory_allocated(job.model.device) + state
        _, total = torch.cuda.mem_get_info(job.model.device)
        findings.fact("", f"measured: {size_of(peak)} of {size_of(total)} on this device")


def memory(recipe: Recipe, progress: Progress = SILENT) -> list[tuple[str, str]]:
    """The report of `gesso check --memory`. Needs the model's configs, neither weights nor a
    device; reads local data where the memory depends on it."""
    assumed = with_data(recipe, progress)
    progress.phase("estimating memory")
    return _memory(assumed)


def _memory(assumed: Assumed) -> list[tuple[str, str]]:
    facts = []
    for role, estimated in estimates(assumed.recipe, assumed.images).items():
        facts += _estimated(assumed, role, estimated)
    return facts


def _estimated(assumed: Assumed, role: Role, estimated: Memory) -> list[tuple[str, str]]:
    recipe = assumed.recipe
    where = f" in each {role}" if recipe.cluster.workers else ""
    lasting = ", ".join(f"{name} {size_of(size)}" for name, size in estimated.lasting.items())
    passing = ", ".join(f"{name} {size_of(size)}" for name, size in estimated.passing.items())
    facts = [
        ("memory", f"about {size_of(estimated.peak)} at the peak{where}"),
        ("", f"always allocated: {lasting}"),
    ]
    if passing:  # not where vLLM samples
        facts.append(("", f"temporary, one at a time: {passing}"))
    if assumed.prompts:
        facts.append(("", f"assuming {assumed.prompts}"))
    if recipe.sampler.engine == "vllm" and role != "learner":
        share = recipe.sampler.vllm.gpu_memory
        when = "" if role == "sampler" else " while sampling"  # a separate sampler always
        facts.append(("", f"vLLM reserves {share:.0%} of the device memory{when}"))
    if estimated.host:
        kept = ", ".join(f"{name} {size_of(size)}" for name, size in estimated.host.items())
        facts.append(("", f"host memory: {kept}"))
    if recipe.model.lora is None:
        copy = size_of(estimated.copy)
        text = (
            f"full fine-tuning: each reference, old or averaged policy is a copy of {copy}; a LoRA "
            "needs no copy for its reference"
        )
        facts.append(("", text))
    return facts


def _time(job: Assembled, sampling: float, updating: float, evaluating: float | None) -> str:
    """Expected time of steps and evaluations, given seconds per sample; `evaluating` if evaluations
    do not take `sampling` seconds per sample."""
    recipe = job.recipe
    step = recipe.data.groups * job.algorithm.group * (sampling + updating)
    if evaluating is None:
        evaluating = sampling * families.of(recipe).eval_cost(recipe, job.algorithm)
    evaluation = len(job.eval_prompts) * recipe.eval.samples * evaluating
    evaluations = 2 + (recipe.steps - 1) // recipe.eval.every if recipe.eval.every else 2
    total = recipe.steps * step + evaluations * evaluation
    return (
        f"about {_duration(step)} per step and {_duration(total)} in total on this machine, if "
        "scoring keeps up with sampling"
    )


def size_of(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

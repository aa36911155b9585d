"""The metrics of a row of metrics.jsonl: what each is, and what a healthy run shows.

`docs/reference/metrics.md` is generated from this table. NAME is a reward, DETAIL one of its
details. A term is a denoising step of a flow model or a token of a language model.
"""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    meaning: str
    healthy: str = ""


METRICS = {
    "step": Metric("Iterations done; row 0 is the evaluation before training."),
    "reward": Metric("Mean total reward over the batch.", "Rises, with noise."),
    "reward/NAME": Metric(
        "Mean of one reward, unweighted.", "No reward falls while another rises."
    ),
    "reward/NAME/DETAIL": Metric(
        "Mean of a detail of a reward; with `ramp`, `reward/NAME/weight` is its weight."
    ),
    "reward/std": Metric(
        "Standard deviation of the total over the batch.",
        "Well above 0: without it there is no signal.",
    ),
    "reward/max": Metric("Largest total of the batch."),
    "reward/at_max": Metric(
        "Share of samples that have the largest total.",
        "Well below 1; at 1 the reward is saturated.",
    ),
    "diversity": Metric(
        "Flow models: mean pairwise RMS distance between the clean latents of one prompt. Language "
        "models: (distinct responses − 1) / (responses − 1) per prompt.",
        "Above 0.3 of its initial value.",
    ),
    "response/length": Metric(
        "Mean response length in tokens, end token included.", "Grows only together with `reward`."
    ),
    "response/max_length": Metric("Longest response of the batch, in tokens."),
    "response/truncated": Metric(
        "Share of responses stopped by `algorithm.max_tokens`.", "Below 0.25, better near 0."
    ),
    "response/logp": Metric("Mean log-prob of a sampled token.", "Rises slowly towards 0."),
    "failed": Metric("Samples without a score.", "0"),
    "eval/reward": Metric(
        "Mean total reward on held-out prompts.",
        "Rises with `reward`. If only `reward` rises, inspect the samples.",
    ),
    "eval/NAME": Metric("Mean of one reward on held-out prompts, unweighted."),
    "eval/NAME/DETAIL": Metric("Mean of a detail on held-out prompts."),
    "eval/failed": Metric("Held-out samples without a score.", "0"),
    "advantage/abs_mean": Metric("Mean |advantage|.", "About 0.5 to 1."),
    "advantage/used": Metric(
        "Share of samples trained on; below 1 with `drop_flat`, `flow-dpo` and `flow-rft`."
    ),
    "advantage/flat_groups": Metric(
        "Share of groups whose samples all have the same reward.", "Below 0.5."
    ),
    "data/seen": Metric("With a curriculum: share of the training prompts seen so far."),
    "data/spread": Metric(
        "With a curriculum: mean over the prompts seen so far of the standard deviation of their "
        "group's rewards when they were last sampled.",
    ),
    "data/expected_spread": Metric(
        'The same mean over the prompts of this batch that had been seen before.", "Above '
        "`data/spread`."
    ),
    "update/ratio": Metric(
        "Mean of exp(Δ log-prob).", "1.0000 with `updates = 1` and `lag = 0`, otherwise near 1."
    ),
    "update/first_abs_dlogp_max": Metric(
        "Largest |Δ log-prob| between sampling and the update, before the first optimizer step.",
        "Rounding (about 1e-7 in float32) at `lag = 0`. More: sampling and training disagree.",
    ),
    "update/abs_dlogp": Metric("Mean |Δ log-prob| over all optimizer steps."),
    "update/abs_dlogp_max": Metric("Largest |Δ log-prob| over all optimizer steps."),
    "update/first_clipped": Metric(
        "Share of terms clipped before the first optimizer step.", "0 at `lag = 0`."
    ),
    "update/clipped": Metric(
        "Share of clipped terms.", "0 on-policy; above about 0.5 the updates are too large."
    ),
    "update/kl": Metric(
        "KL to the reference model, with `beta` or `kl`; for language models in nats per token.",
        "Rises slowly; below 1 for language models.",
    ),
    "update/distance": Metric(
        "Distillation: distance of a step from the teacher's, `update/distance/NAME` per teacher; "
        "for language models the KL to the teacher, in nats per token.",
        "Falls.",
    ),
    "update/renewed": Metric("With `renew`: 1 if the reference was renewed before this step."),
    "gate/doubt": Metric(
        "With `gate`: mean U of the samples with U ≥ 0. U is the share of the batch that a sample "
        "beats by the trained reward, minus the same by the rewards of weight 0.",
        "Steady; it rises when the rewards disagree.",
    ),
    "gate/share": Metric(
        "With `gate`: share of those samples that the KL applies to; samples that are equally "
        "doubtful as the last of them are added."
    ),
    "update/entropy": Metric(
        "Mean entropy of the token distribution, in nats.", "Falls slowly; near 0 exploration ends."
    ),
    "update/importance": Metric(
        "Mean importance weight, with `importance`.", "1; below 0.9 the caps remove much."
    ),
    "update/importance_bounded": Metric("Share of weights truncated or masked.", "Near 0."),
    "update/sampler_gap": Metric(
        "Mean |Δ log-prob| between learner and sampler, with `importance`.",
        "1e-6 in float32, 0.01 to 0.05 in bfloat16.",
    ),
    "update/sampler_gap_max": Metric("The largest such difference."),
    "update/value": Metric("PPO: mean value of a token.", "Follows `reward`."),
    "update/value_error": Metric("PPO: mean |value − return|.", "Falls."),
    "update/drift": Metric("DiffusionNFT, AWM: mean (v − v_old)².", "Small and steady."),
    "update/matching": Metric("AWM, DGPO, DPO, RFT, SFT: mean flow-matching loss.", "Steady."),
    "update/reward": Metric(
        "DRaFT, ReFL, LeapAlign: mean reward of the images that are differentiated.",
        "Follows `reward`.",
    ),
    "update/nll": Metric("SFT, DPO: mean −log-prob of a trained token.", "SFT: falls."),
    "update/preference": Metric("DPO, Flow-DPO: mean −log σ(β·margin).", "Falls from 0.69."),
    "update/margin": Metric(
        "DPO: mean gain of log-prob over the reference, chosen − rejected response.", "Rises."
    ),
    "update/accuracy": Metric("DPO, Flow-DPO: share of positive margins.", "Rises to 1."),
    "update/grad_norm": Metric(
        "Gradient norm before clipping, mean over optimizer steps.",
        "Steady; null when no step was taken.",
    ),
    "update/skipped": Metric("Optimizer steps skipped because a value was not finite.", "0"),
    "update/lr": Metric("Learning rate of the last optimizer step."),
    "health": Metric("Kinds of active health warnings.", "[]"),
    "age": Metric("Updates between sampling and training.", "0, or up to `lag`."),
    "age/mean": Metric(
        "With `partial`: mean age of the tokens; `age` is that of the oldest token.", "1 to `lag`."
    ),
    "age/continued": Metric(
        "With `partial`: share of responses that continued after a change of weights."
    ),
    "refilled": Metric(
        "Groups resampled in place of flat ones, with `refills`.", "Below `data.groups`."
    ),
    "ended_early": Metric(
        "With `probe`: groups that ended after their first responses.", "Below `data.groups`."
    ),
    "cached": Metric("Scores taken from the reward cache since the previous row."),
    "samples_per_s": Metric("Samples per second of sampling, scoring and update."),
    "memory/gb": Metric(
        "GPU: peak allocated memory of this step. CPU: peak memory of the process so far.",
        "Constant after the first steps.",
    ),
    "cluster/idle": Metric(
        "Mean share of the time of sampling and updates in which a worker computes nothing.",
        "Below 0.2.",
    ),
    "cluster/idle/RANK": Metric("The same for one worker."),
    "cluster/slowest": Metric(
        "Seconds per sample of the slowest worker, relative to the typical one.", "Below 3."
    ),
    "cluster/slowest_rank": Metric("Rank of the slowest worker."),
    "cluster/sent_gb": Metric("GB of samples and gradients that the workers exchanged."),
    "cluster/weights_gb": Metric("GB of weights sent to separate samplers before this step."),
    "cluster/weights_s": Metric("Seconds for sending these weights."),
    "time/sample": Metric("Seconds from the first to the last sample."),
    "time/score": Metric("Seconds from the first to the last score."),
    "time/overlap": Metric(
        "Seconds during which sampling and scoring overlap.",
        "Near `time/score`: scoring costs nothing extra.",
    ),
    "time/wait": Metric(
        "Seconds waited for scores after the last sample.", "Near 0; otherwise add workers."
    ),
    "time/update": Metric("Seconds of the update."),
    "time/eval": Metric("Seconds of the evaluation."),
    "time/step": Metric("Seconds of the row, evaluation included."),
    "time/total": Metric("Seconds of all rows, over all resumes."),
}

"""Breaks the code on purpose, one line at a time: some test must fail each time.

    python -m tests.mutants                  all of them, two at a time
    python -m tests.mutants kl cache-key     those whose name contains one of these words
    python -m tests.mutants --list           names, files and tests

Every mutant replaces a text that occurs once in its file and names the tests that must notice. Each
selection of tests runs first without any mutant and must pass. The tree is copied to a temporary
folder; this one is not touched. The process imports torch, diffusers and transformers once and is
forked for every run. Exit status 1: a mutant survived, no longer applies, or a selection fails by
itself.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import os
import py_compile
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = (
    "gesso", "tests", "tools", "docs", "examples", "benchmarks", "pyproject.toml", "README.md",
)  # fmt: skip
PRELOADED = (
    "torch", "numpy", "PIL.Image", "pydantic", "httpx", "fastapi.testclient", "pytest", "peft",
    "transformers", "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
)  # fmt: skip
LIMIT = 600.0  # seconds of one run; a mutant that makes its tests hang is noticed
SHOWN = 3000  # characters of pytest's output


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str  # occurs exactly once
    new: str
    tests: str  # arguments of pytest


MUTANTS = [
    # Editing data and rewards
    Mutant(
        "image-upright",
        "gesso/image_files.py",
        "ImageOps.exif_transpose(image, in_place=True)",
        "pass",
        "tests/data/test_image_files.py",
    ),
    Mutant(
        "unchanged-mask",
        "gesso/rewards/edits.py",
        "return 1 - grey",
        "return grey",
        "tests/rewards/test_edits.py -k mask",
    ),
    Mutant(
        "mask-in-the-cache-key",
        "gesso/rewards/transport/cache.py",
        "for p in prompt.for_rewards]",
        "for p in prompt.images]",
        "tests/rewards/test_prompt_images.py -k key",
    ),
    Mutant(
        "alias-parts",
        "gesso/rewards/assembly.py",
        "WeightedReward(e.label, e.weight",
        "WeightedReward(e.name, e.weight",
        "tests/rewards/test_compose.py -k alias_names",
    ),
    Mutant(
        "alias-watched",
        "gesso/health/rows.py",
        'f"eval/{entry.label}"',
        'f"eval/{entry.name}"',
        "tests/rewards/test_compose.py -k alias_names",
    ),
    Mutant(
        "letters-repeated",
        "gesso/formulas/text.py",
        "for character in text) / len(target)",
        "for character in set(text)) / len(target)",
        "tests/formulas/test_text.py",
    ),
    Mutant(
        "text-full-width",
        "gesso/formulas/text.py",
        'unicodedata.normalize("NFKC", text)',
        "text",
        "tests/formulas/test_text.py",
    ),
    Mutant(
        "hacking-fell-twice",
        "gesso/health/__init__.py",
        "if max(late) < min(early) and before - now > margin:",
        "if before - now > margin:",
        "tests/test_health.py -k hacking",
    ),
    Mutant(
        "hacking-collapse",
        "gesso/health/__init__.py",
        "if min(trained) < trained[0] - error:",
        "if False:",
        "tests/test_health.py -k hacking",
    ),
    Mutant(
        "hacking-noise",
        "gesso/health/__init__.py",
        "margin = max(ERRORS * noise, MIN_DROP * (max(values) - min(values)))",
        "margin = MIN_DROP * (max(values) - min(values))",
        "tests/test_health.py -k hacking",
    ),
    Mutant(
        "edit-word-of-the-input",
        "gesso/rewards/image/sign_edit.py",
        "target_of(sample.prompt) or self._word_of(sample)",
        "target_of(sample.prompt)",
        "tests/rewards/test_sign_edit.py",
    ),
    Mutant(
        "edit-colour-of-the-input",
        "gesso/rewards/image/sign_edit.py",
        "most_frequent(colour_shares(source(sample)))",
        "most_frequent(colour_shares(sample.pixels))",
        "tests/rewards/test_sign_edit.py",
    ),
    Mutant(
        "read-full-width",
        "gesso/rewards/image/ocr.py",
        'unicodedata.normalize("NFKC", " ".join(result.txts or ()))',
        '" ".join(result.txts or ())',
        "tests/rewards/test_ocr.py -k full_width",
    ),
    Mutant(
        "other-format",
        "gesso/image_files.py",
        "source[offset:].startswith(magic)",
        "False",
        "tests/data/test_image_files.py",
    ),
    Mutant(
        "image-folder",
        "gesso/data/images.py",
        "if any(map(os.path.isdir, _places(paths[0], folder))):",
        "if False:",
        "tests/use/test_sources.py",
    ),
    Mutant(
        "sft-target-image",
        "gesso/families/classes.py",
        "numbers.start > 0",
        "False",
        "tests/data/test_edits.py",
    ),
    Mutant(
        "longer-than-any-ratio",
        "gesso/data/ratios.py",
        "> 1.1 * LONGEST.width",
        "> 99 * LONGEST.width",
        "tests/test_editing_runs.py tests/data/test_edits.py",
    ),
    # Videos
    Mutant(
        "video-first-sigma",
        "gesso/models/flow/multistep.py",
        "sigmas[0] = 1.0",
        "pass",
        "tests/models/test_wan.py -k begins",
    ),
    Mutant(
        "video-shifted-twice",
        "gesso/models/flow/multistep.py",
        "super().sigmas(steps, height, width, frames).clone()",
        "super().sigmas(steps, height, width, frames) ** 0.5",
        "tests/models/test_wan.py -k begins",
    ),
    Mutant(
        "video-last-timestep",
        "gesso/models/flow/multistep.py",
        ".clamp(max=scale - 1)",
        "",
        "tests/models/test_wan.py -k integers",
    ),
    Mutant(
        "video-integer-timesteps",
        "gesso/models/flow/multistep.py",
        "torch.where(missed != 0, sigmas[:-1].nextafter(towards), sigmas[:-1])",
        "sigmas[:-1]",
        "tests/models/test_wan.py -k integers",
    ),
    Mutant(
        "video-cross-attention-joined",
        "gesso/models/flow/joined.py",
        'if getattr(module, "is_cross_attention", False):',
        "if False:",
        "tests/models/test_wan.py -k join",
    ),
    Mutant(
        "video-second-experts-file",
        "gesso/models/flow/wan.py",
        '"transformer_2": "pytorch_lora_weights_2.safetensors",',
        "",
        "tests/models/test_wan_variants.py -k each_expert",
    ),
    Mutant(
        "video-second-experts-layers",
        "gesso/models/flow/wan.py",
        'if key.startswith(f"{name}.")',
        "",
        "tests/models/test_wan_variants.py -k each_expert",
    ),
    Mutant(
        "video-second-experts-scale",
        "gesso/models/flow/wan.py",
        "torch.where(second, self.guidance_2, scale)",
        "torch.where(second, scale, scale)",
        "tests/models/test_wan_variants.py -k text_to_video",
    ),
    Mutant(
        "video-boundary-of-experts",
        "gesso/models/flow/experts.py",
        "low = timestep < self.boundary",
        "low = timestep > self.boundary",
        "tests/models/test_wan_variants.py -k rows_of_both",
    ),
    Mutant(
        "video-image-text-tokens",
        "gesso/models/flow/wan_i2v.py",
        "least=limits.most",
        "least=limits.least",
        "tests/models/test_wan_variants.py -k bad_input",
    ),
    Mutant(
        "video-pinned-time",
        "gesso/models/flow/wan_i2v.py",
        "time[:, :cells] = 0",
        "pass",
        "tests/models/test_wan_variants.py -k image_to_video_is",
    ),
    Mutant(
        "video-pinned-noise",
        "gesso/models/flow/wan_i2v.py",
        "return noise[:, 1:] if self.pinned",
        "return noise[:, :-1] if self.pinned",
        "tests/models/test_wan_variants.py -k image_to_video_is",
    ),
    Mutant(
        "video-condition-mask",
        "gesso/models/flow/wan_i2v.py",
        "mask[:, :, 0] = 1",
        "mask[:] = 1",
        "tests/models/test_wan_variants.py -k image_to_video_is",
    ),
    Mutant(
        "video-nearest-frames",
        "gesso/models/flow/wan.py",
        "round((frames - 1) / step) * step + 1",
        "frames // step * step + 1",
        "tests/models/test_wan.py -k do_not_fit",
    ),
    Mutant(
        "video-worst-frame",
        "gesso/rewards/frames.py",
        'reverse=ranked[1] == "best"',
        "reverse=True",
        "tests/rewards/test_videos.py -k frames_that_count",
    ),
    Mutant(
        "video-failed-frame",
        "gesso/rewards/frames.py",
        "if score.error is not None:",
        "if False:",
        "tests/rewards/test_videos.py -k failures",
    ),
    Mutant(
        "video-motion-direction",
        "gesso/rewards/video/motion.py",
        "max(0.0, x * dx + y * dy)",
        "abs(x * dx + y * dy)",
        "tests/rewards/test_videos.py -k shifts",
    ),
    Mutant(
        "video-rows-of-other-lengths",
        "gesso/families/flow_checks.py",
        "if given != value:",
        "if False:",
        "tests/test_videos.py -k other_lengths",
    ),
    Mutant(
        "video-clip-rate",
        "gesso/video_files.py",
        "len(found) / fps < seconds - TOLERANCE",
        "len(found) < seconds * fps / 2",
        "tests/track/test_videos.py -k rate_of_the_model",
    ),
    Mutant(
        "video-videos-in-step",
        "gesso/viewer/page/video.js",
        "for (const v of all) v.currentTime =",
        "for (const v of all.slice(0, 1)) v.currentTime =",
        "tests/viewer/test_page_videos.py -k in_step",
    ),
    Mutant(
        "video-bar-moves-the-page",
        "gesso/viewer/page/views.css",
        ".video-bar.waiting { visibility: hidden; }",
        ".video-bar.waiting { display: none; }",
        "tests/viewer/test_page_videos.py -k nothing_below",
    ),
    # Formulas: steps and samplers
    Mutant(
        "step-logp-variance",
        "gesso/formulas/flow_steps.py",
        "-error / (2 * std.square())",
        "-error / std.square()",
        "tests/formulas/test_flow_steps.py",
    ),
    Mutant(
        "step-logp-in-float32",
        "gesso/formulas/flow_steps.py",
        "density.mean(1, dtype=torch.float64)",
        "density.mean(1)",
        "tests/formulas/test_flow_steps.py -k rounded",
    ),
    Mutant(
        "distance-to-the-teacher-negated",
        "gesso/algorithms/opd.py",
        "-terms.trace.select(terms.prepared.advantages)",
        "terms.trace.select(terms.prepared.advantages)",
        "tests/algorithms/test_opd.py -k plain_computation",
    ),
    Mutant(
        "padding-selected",
        "gesso/traces/tokens.py",
        "return self.mask.flatten().nonzero()[:, 0]",
        "return torch.ones_like(self.mask).flatten().nonzero()[:, 0]",
        "tests/models/test_tokens.py -k packed",
    ),
    Mutant(
        "strict-models-sampled-under-another-setting",
        "gesso/models/flow/pipeline.py",
        "strict = deterministic_algorithms(self)",
        "strict = deterministic_algorithms(None)",
        "tests/models/test_repeatable.py -k one_setting",
    ),
    Mutant(
        "step-logp-sum",
        "gesso/formulas/flow_steps.py",
        "density.mean(1, dtype=torch.float64)",
        "density.sum(1, dtype=torch.float64)",
        "tests/formulas/test_flow_steps.py",
    ),
    Mutant(
        "step-sde-sigma-1",
        "gesso/formulas/flow_steps.py",
        "torch.where(sigma == 1, sigma_1, sigma)",
        "torch.where(sigma == 1, 0.99, sigma)",
        "tests/formulas/test_flow_steps.py",
    ),
    Mutant(
        "step-sde-drift",
        "gesso/formulas/flow_steps.py",
        "v * (1 + s2 * (1 - sigma) / (2 * sigma)) * dt",
        "v * (1 + s2 / (2 * sigma)) * dt",
        "tests/formulas/test_flow_steps.py",
    ),
    Mutant(
        "step-cps-noise",
        "gesso/formulas/flow_steps.py",
        "math.sin(noise * math.pi / 2)",
        "noise",
        "tests/formulas/test_flow_steps.py",
    ),
    Mutant(
        "step-dpm2-order",
        "gesso/formulas/flow_steps.py",
        "(clean - before.x) / (2 * r)",
        "(clean - before.x) / r",
        "tests/formulas/test_flow_steps.py",
    ),
    # Formulas: advantages
    Mutant(
        "advantage-std-correction",
        "gesso/formulas/advantages.py",
        "degrees = min(correction, len(rewards) - 1)",
        "degrees = 1",
        "tests/formulas/test_advantages.py",
    ),
    Mutant(
        "advantage-epsilon",
        "gesso/formulas/advantages.py",
        "EPSILON = 1e-4",
        "EPSILON = 1e-8",
        "tests/formulas/test_advantages.py",
    ),
    Mutant(
        "advantage-leave-one-out",
        "gesso/formulas/advantages.py",
        "/ (count[row] - 1)",
        "/ count[row]",
        "tests/formulas/test_advantages.py",
    ),
    Mutant(
        "advantage-gae-lambda",
        "gesso/formulas/advantages.py",
        "delta + gamma * lam * next_advantage",
        "delta + gamma * next_advantage",
        "tests/formulas/test_token_advantages.py",
    ),
    # Formulas: objectives, KL, aggregation, NFT
    Mutant(
        "clip-direction",
        "gesso/formulas/objectives.py",
        "torch.maximum(free, bound)",
        "torch.minimum(free, bound)",
        "tests/formulas/test_objectives.py",
    ),
    Mutant(
        "clip-higher-and-lower",
        "gesso/formulas/objectives.py",
        "ratio.clamp(1 - low, 1 + high)",
        "ratio.clamp(1 - high, 1 + low)",
        "tests/formulas/test_objectives.py tests/formulas/test_token_objectives.py",
    ),
    Mutant(
        "clip-dual-sign",
        "gesso/formulas/objectives.py",
        "capped = (advantage < 0)",
        "capped = (advantage > 0)",
        "tests/formulas/test_token_objectives.py",
    ),
    Mutant(
        "gspo-mean-over-padding",
        "gesso/formulas/objectives.py",
        "log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True)",
        "log_ratio.mean(1, keepdim=True)",
        "tests/formulas/test_token_objectives.py",
    ),
    Mutant(
        "sapo-temperatures",
        "gesso/formulas/objectives.py",
        "masked_fill(advantage > 0, tau_pos)",
        "masked_fill(advantage < 0, tau_pos)",
        "tests/formulas/test_token_objectives.py",
    ),
    Mutant(
        "sapo-scale",
        "gesso/formulas/objectives.py",
        "-advantage * 4 / tau * gate",
        "-advantage * 4 * gate",
        "tests/formulas/test_token_objectives.py",
    ),
    Mutant(
        "importance-product",
        "gesso/formulas/objectives.py",
        "mean = log_weight.sum(1, keepdim=True) / mask.sum(1, keepdim=True)",
        "mean = log_weight.sum(1, keepdim=True)",
        "tests/formulas/test_token_objectives.py",
    ),
    Mutant(
        "importance-of-the-kl",
        "gesso/algorithms/policy_gradient.py",
        "token_loss = token_loss + self.kl.beta * distance",
        "token_loss = token_loss + self.kl.beta * distance * (prepared.importance if "
        "self.importance else 1)",
        "tests/algorithms/test_responses.py -k importance_and_kl",
    ),
    Mutant(
        "importance-off-for-vllm",
        "gesso/families/tokens.py",
        'if recipe.sampler.engine != "vllm":\n            return {}',
        'if recipe.sampler.engine == "vllm":\n            return {}',
        "tests/algorithms/test_responses.py -k another_engine",
    ),
    Mutant(
        "value-loss-clip",
        "gesso/formulas/objectives.py",
        "torch.maximum(error, (clipped_values",
        "torch.minimum(error, (clipped_values",
        "tests/formulas/test_token_objectives.py",
    ),
    Mutant(
        "kl-k3-sign",
        "gesso/formulas/kl.py",
        "exponent = (-k1).clamp",
        "exponent = k1.clamp",
        "tests/formulas/test_kl.py",
    ),
    Mutant(
        "kl-gaussian-variance",
        "gesso/formulas/kl.py",
        "(2 * scale.square())",
        "scale.square()",
        "tests/formulas/test_objectives.py",
    ),
    Mutant(
        "aggregation-by-sequence",
        "gesso/formulas/aggregation.py",
        "weights / (rows * tokens)",
        "weights / tokens.sum()",
        "tests/formulas/test_aggregation.py",
    ),
    Mutant(
        "nft-negative-branch",
        "gesso/formulas/nft.py",
        "(1 + beta) * v_old - beta * v",
        "(1 - beta) * v_old + beta * v",
        "tests/formulas/test_nft.py",
    ),
    Mutant(
        "nft-old-policy-decay",
        "gesso/formulas/nft.py",
        "min(0.001 * step, 0.5)",
        "min(0.001 * step, 0.9)",
        "tests/formulas/test_nft.py",
    ),
    Mutant(
        "nft-samples-with-current-weights",
        "gesso/algorithms/diffusion_nft.py",
        'weights="old"',
        'weights="current"',
        "tests/test_settings.py -k old_policy",
    ),
    Mutant(
        "reactions-forgotten-on-resume",
        "gesso/loop.py",
        "self._react(self._health.feed(row))",
        "self._health.feed(row)",
        "tests/test_reactions.py -k halved",
    ),
    Mutant(
        "doubt-has-the-sign-of-the-published-code",
        "gesso/formulas/advantages.py",
        "return _share_beaten(reward) - ranks.nanmean(1)",
        "return ranks.nanmean(1) - _share_beaten(reward)",
        "tests/algorithms/test_gardo.py -k golden",
    ),
    Mutant(
        "gate-without-effect",
        "gesso/algorithms/flow_grpo.py",
        "self.beta * terms.kl_share * distance",
        "self.beta * distance",
        "tests/algorithms/test_gardo.py -k divided_by_all",
    ),
    Mutant(
        "reference-never-renewed",
        "gesso/algorithms/flow.py",
        "self.renew.due(rows)",
        "False",
        "tests/algorithms/test_gardo.py -k resumed",
    ),
    Mutant(
        "expected-figures-inherited",
        "gesso/config/tables.py",
        'inherited.pop("expect", None)',
        'inherited.get("expect", None)',
        "tests/test_expect.py -k inherit",
    ),
    Mutant(
        "other-rewards-keep-the-judges",
        "gesso/config/tables.py",
        'unfit = {"expect", "eval_reward"} if "reward" in changes else unfit',
        "pass",
        "tests/test_config.py -k other_judges",
    ),
    Mutant(
        "ramp-without-effect-on-the-total",
        "gesso/rewards/transport/service.py",
        "weight=weights[reward.name]",
        "weight=reward.weight",
        "tests/rewards/test_compose.py -k ramp_changes",
    ),
    Mutant(
        "kl-not-raised",
        "gesso/algorithms/flow_grpo.py",
        "self.beta * factor",
        "self.beta",
        "tests/test_reactions.py -k raising",
    ),
    Mutant(
        "dpo-prefers-a-tie",
        "gesso/formulas/advantages.py",
        "if values[high] > values[low]:",
        "if values[high] >= values[low]:",
        "tests/formulas/test_advantages.py -k extremes",
    ),
    Mutant(
        "continued-tokens-have-the-first-version",
        "gesso/samplers/decode.py",
        "more = versions.new_full((length - len(versions),), self.sampler.weights.version)",
        "more = versions.new_full((length - len(versions),), 0)",
        "tests/cluster/test_partial.py -k tokens_after_a_swap",
    ),
    Mutant(
        "continued-responses-restart-their-seed",
        "gesso/samplers/decode.py",
        "self.buffers.count[slot] = count",
        "self.buffers.count[slot] = 0",
        "tests/cluster/test_partial.py -k tokens_after_a_swap",
    ),
    Mutant(
        "resumed-responses-begin-again",
        "gesso/cluster/partial.py",
        "restored = self._restored.pop(batch.step, new)",
        "restored = new",
        "tests/cluster/test_partial.py -k resumed_run",
    ),
    Mutant(
        "samplers-lack-a-copy-of-later-steps",
        "gesso/cluster/driver.py",
        "steps = range(version, version + self.recipe.lag + 1)",
        "steps = range(1)",
        "tests/cluster/test_workers.py -k number_of_workers_does_not_change_a_bit[dgpo]",
    ),
    Mutant(
        "empty-mini-batches-step",
        "gesso/learner/learner.py",
        "if not len(terms):",
        "if False:",
        "tests/algorithms/test_noised.py -k without_spread",
    ),
    Mutant(
        "dpo-times-of-the-samplers-steps",
        "gesso/algorithms/noised.py",
        "fine = context.fine",
        "fine = context.sigmas",
        "tests/algorithms/test_noised.py -k pretraining",
    ),
    Mutant(
        "probe-ends-groups-with-spread",
        "gesso/cluster/driver.py",
        "open_rows = [row for row, seen in rewards.items() if len(seen) > 1]",
        "open_rows = [row for row, seen in rewards.items() if len(seen) > 2]",
        "tests/test_token_loop.py -k group_ends",
    ),
    Mutant(
        "leap-without-its-first-step",
        "gesso/formulas/reward_gradient.py",
        "x = straight_through(middle, from_start)",
        "x = middle",
        "tests/formulas/test_reward_gradient.py -k leap_align",
    ),
    Mutant(
        "draft-on-noise-of-the-next-step",
        "gesso/algorithms/reward_gradient.py",
        "states=trace.latents[rows[:, None], steps - self.recorded.start]",
        "states=trace.latents[rows[:, None], steps - self.recorded.start + 1]",
        "tests/algorithms/test_reward_gradient.py -k sampled_path",
    ),
    Mutant(
        "awm-ratio-always-one",
        "gesso/algorithms/awm.py",
        "old = terms.old_loss if self.needs_old_loss else matched.detach()",
        "old = matched.detach()",
        "tests/algorithms/test_noised.py -k awm_equals",
    ),
    Mutant(
        "dgpo-noise-per-sample",
        "gesso/algorithms/noised.py",
        "return [lowest[group] for group in groups]",
        "return seeds",
        "tests/algorithms/test_noised.py -k same_noise",
    ),
    Mutant(
        "dpo-margin-sign",
        "gesso/formulas/dpo.py",
        "torch.sigmoid(-beta * margin) * sign",
        "torch.sigmoid(beta * margin) * sign",
        "tests/formulas/test_dpo.py",
    ),
    Mutant(
        "dpo-mean-over-responses",
        "gesso/algorithms/dpo.py",
        "len(used) // 2)  # pairs",
        "len(used))",
        "tests/algorithms/test_likelihood.py",
    ),
    Mutant(
        "vae-shift-of-encoding",
        "gesso/models/flow/pipeline.py",
        "(z - vae.config.shift_factor) * vae.config.scaling_factor",
        "z * vae.config.scaling_factor - vae.config.shift_factor",
        "tests/models/test_pipelines.py -k inverse",
    ),
    Mutant(
        "given-score-of-the-rejected",
        "gesso/samplers/given.py",
        "float(self.place[i] == 0)",
        "1.0",
        "tests/samplers/test_given.py",
    ),
    Mutant(
        "dgpo-groups-cut",
        "gesso/algorithms/preference.py",
        "whole_groups: ClassVar[bool] = True",
        "whole_groups: ClassVar[bool] = False",
        "tests/algorithms/test_noised.py -k stay_whole",
    ),
    Mutant(
        "dgpo-preference-of-sums",
        "gesso/formulas/matching.py",
        "beta * sums / counts",
        "beta * sums",
        "tests/formulas/test_matching.py",
    ),
    Mutant(
        "windows-share-a-batch",
        "gesso/samplers/base.py",
        "if isinstance(spec, SampleSpec) and spec.starts:",
        "if False:",
        "tests/algorithms/test_branching.py -k batch",
    ),
    Mutant(
        "flash-steps-not-weighted",
        "gesso/algorithms/flash_grpo.py",
        "loss=surrogate.loss * own / pool.mean()",
        "loss=surrogate.loss",
        "tests/algorithms/test_branching.py -k weighted",
    ),
    Mutant(
        "separate-adapter-never-off",
        "gesso/weights/lora_linear.py",
        "if self.disable_adapters or self.merged:",
        "if self.merged:",
        "tests/weights/test_lora_linear.py",
    ),
    Mutant(
        "ema-decay",
        "gesso/formulas/averages.py",
        "to(tensor.dtype), 1 - decay)",
        "to(tensor.dtype), decay)",
        "tests/formulas/test_objectives.py",
    ),
    Mutant(
        "dithering-threshold",
        "gesso/formulas/precision.py",
        ".bitwise_and_(0xFFFF)",
        ".bitwise_and_(0x7FFF)",
        "tests/formulas/test_precision.py",
    ),
    Mutant(
        "dithering-lower-half",
        "gesso/formulas/precision.py",
        '1 if sys.byteorder == "little" else 0',
        '0 if sys.byteorder == "little" else 1',
        "tests/formulas/test_precision.py",
    ),
    Mutant(
        "folding-shared-storage",
        "gesso/weights/folded_linear.py",
        "matrix.clone(memory_format=torch.contiguous_format)",
        "matrix",
        "tests/models/test_folded.py",
    ),
    Mutant(
        "sizes-hidden-by-options",
        "gesso/families/classes.py",
        "if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):",
        "if parameters:",
        "tests/weights/test_sharding.py -k bundled",
    ),
    Mutant(
        "dgpo-shared-reference",
        "gesso/algorithms/noised.py",
        'if weights == "reference" and self.reference is not None:',
        'if weights == "old" and self.reference is not None:',
        "tests/algorithms/test_noised.py -k 'dgpo_equals or runs_once'",
    ),
    Mutant(
        "picked-share",
        "gesso/learner/learner.py",
        "kept[prepared.picked[kept]]",
        "kept",
        "tests/algorithms/test_noised.py -k share_of_trained",
    ),
    # Distillation
    Mutant(
        "distil-token-gap",
        "gesso/algorithms/opd.py",
        "teacher_gap(theirs, prepared.old, rollout.mask)",
        "teacher_gap(prepared.old, theirs, rollout.mask)",
        "tests/algorithms/test_opd.py -k plain_computation",
    ),
    Mutant(
        "distil-padded-vocabulary",
        "gesso/models/tokens/teacher.py",
        "{*student.suppressed_ids(), *beyond}",
        "set(student.suppressed_ids())",
        "tests/algorithms/test_opd.py -k padded",
    ),
    Mutant(
        "distil-teacher-guidance",
        "gesso/algorithms/flow_opd.py",
        "terms.rows(part), name, scale).mean",
        "terms.rows(part), name).mean",
        "tests/algorithms/test_flow_opd.py -k plain_computation",
    ),
    Mutant(
        "distil-lora-scale",
        "gesso/use/teachers.py",
        "/ rank / (lora.alpha / lora.rank)",
        "/ rank",
        "tests/algorithms/test_flow_opd.py -k converted_exactly",
    ),
    Mutant(
        "distil-changed-teacher",
        "gesso/learner/learner.py",
        "if not torch.equal(found, tables[TEACHERS][teacher]):",
        "if False:",
        "tests/algorithms/test_flow_opd.py -k resumes_exactly",
    ),
    # Samplers
    Mutant(
        "sampler-seed-per-sample",
        "gesso/samplers/denoise.py",
        "torch.Generator().manual_seed(seed) for seed in seeds]",
        "torch.Generator().manual_seed(seeds[0]) for seed in seeds]",
        "tests/samplers/test_denoise.py -k cut",
    ),
    Mutant(
        "sampler-window",
        "gesso/samplers/denoise.py",
        "if i in spec.stochastic:",
        "if i in range(spec.stochastic.stop):",
        "tests/samplers/test_denoise.py -k window",
    ),
    Mutant(
        "sampler-guidance-scale",
        "gesso/models/flow/pipeline.py",
        "return negative + scale * (positive - negative)",
        "return positive + scale * (positive - negative)",
        "tests/samplers/test_denoise.py -k diffusers_own",
    ),
    Mutant(
        "sampler-even-sigmas",
        "gesso/models/flow/pipeline.py",
        "np.linspace(1.0, 1 / steps, steps)",
        "np.linspace(1.0, 0.0, steps)",
        "tests/models/test_pipelines.py -k 'diffusers_own and flux-dev'",
    ),
    Mutant(
        "idle-slots-count-tokens",
        "gesso/samplers/buffers.py",
        "count += runs",
        "count += 1",
        "tests/samplers/test_stepping.py -k same_responses",
    ),
    Mutant(
        "a-graph-per-number-of-tokens",
        "gesso/models/tokens/repeating.py",
        "starts.shape[0] - 1, *x.shape[1:])",
        "len(starts) - 1, *x.shape[1:])",
        "tests/models/test_repeating.py",
    ),
    Mutant(
        "only-one-copy-of-a-key-has-a-gradient",
        "gesso/models/tokens/repeating.py",
        "total.index_add_(0, token, x[copies].float())",
        "total.index_copy_(0, token, x[copies].float())",
        "tests/models/test_repeating.py",
    ),
    Mutant(
        "drawn-tokens-at-the-wrong-place",
        "gesso/samplers/buffers.py",
        "torch.where(runs[:, None], values[:, None], buffer.gather(1, at))",
        "values[:, None]",
        "tests/samplers/test_stepping.py -k same_responses",
    ),
    Mutant(
        "decoder-seed-per-sample",
        "gesso/samplers/decode.py",
        "_uniform(self.seeds[i], self.spec.max_tokens)",
        "_uniform(self.seeds[0], self.spec.max_tokens)",
        "tests/samplers/test_decode.py -k depend",
    ),
    # Weights
    Mutant(
        "folding-scale",
        "gesso/weights/folded_linear.py",
        "weights.baddbmm_(b, a, alpha=scale)",
        "weights.baddbmm_(b, a)",
        "tests/models/test_folded.py -k one_by_one",
    ),
    Mutant(
        "folding-gradient-scale",
        "gesso/weights/folded_linear.py",
        "(t.to(a[0].dtype) * s for t, s in scaled)",
        "(t.to(a[0].dtype) for t, s in scaled)",
        "tests/models/test_folded.py -k plain_autograd",
    ),
    Mutant(
        "copies-not-exchanged",
        "gesso/weights/copies.py",
        "in self.tensors(which).items():",
        "in self.tensors().items():",
        "tests/models/test_policy.py -k take_their_place",
    ),
    Mutant(
        "snapshot-shares-memory",
        "gesso/weights/copies.py",
        "name: p.detach().clone()",
        "name: p.detach()",
        "tests/models/test_policy.py",
    ),
    Mutant(
        "publish-checksum-position",
        "gesso/weights/publish.py",
        "(part * torch.arange(2 * start + 1, 2 * end, 2, device=part.device)).sum()",
        "part.sum()",
        "tests/weights/test_publish.py",
    ),
    Mutant(
        "publish-digest-not-compared",
        "gesso/weights/publish.py",
        "if digest(held) != publication.digest:",
        "if digest(held) == publication.digest and False:",
        "tests/weights/test_publish.py",
    ),
    Mutant(
        "merged-without-adapter",
        "gesso/weights/merge.py",
        "weight.float() + layer.get_delta_weight(ADAPTER).float()",
        "weight.float()",
        "tests/use/test_export.py -k plain_diffusers",
    ),
    # Learner
    Mutant(
        "learner-denominator",
        "gesso/learner/learner.py",
        "result.loss.sum() / terms.total",
        "result.loss.mean()",
        "tests/learner/test_learner.py -k micro_batches",
    ),
    Mutant(
        "learner-gradient-clipping",
        "gesso/learner/learner.py",
        "        clip_grads_with_norm_(kind, max_norm, norm)",
        "        pass",
        "tests/test_settings.py -k adamw",
    ),
    Mutant(
        "learner-non-finite-step-taken",
        "gesso/learner/learner.py",
        'if finite and max(norms) < float("inf") else None',
        "",
        "tests/learner/test_learner.py -k not_finite",
    ),
    Mutant(
        "learner-warmup",
        "gesso/learner/learner.py",
        "(self.optimizer_steps + 1) / warmup",
        "self.optimizer_steps / warmup",
        "tests/learner/test_learner.py -k warmup",
    ),
    Mutant(
        "learner-ema-every-step",
        "gesso/learner/learner.py",
        "self.optimizer_steps % ema.every == 0",
        "self.optimizer_steps",
        "tests/learner/test_learner.py -k ema",
    ),
    Mutant(
        "learner-restores-no-moments",
        "gesso/learner/learner.py",
        "    copy = tensor.clone()",
        "    copy = torch.zeros_like(tensor)",
        "tests/learner/test_learner.py -k restores",
    ),
    Mutant(
        "learner-restores-no-step-count",
        "gesso/learner/learner.py",
        'self.optimizer_steps = int(state["optimizer_steps"])',
        "self.optimizer_steps = 0",
        "tests/learner/test_learner.py -k restores",
    ),
    # Cluster and loop
    Mutant(
        "cluster-samples-after-the-update",
        "gesso/cluster/driver.py",
        "        self.sample_queued()  # with the weights before this update",
        "        pass",
        "tests/cluster/test_local.py -k collect_returns",
    ),
    Mutant(
        "cluster-draws-unpublished-weights",
        "gesso/cluster/driver.py",
        "if self._changed and self.shares_weights:",
        "if False:",
        "tests/cluster/test_local.py -k publication",
    ),
    Mutant(
        "cluster-refills-nothing",
        "gesso/cluster/driver.py",
        "missing = groups - len(kept.group.unique())",
        "missing = 0",
        "tests/test_token_loop.py -k refill",
    ),
    Mutant(
        "cluster-pieces-out-of-order",
        "gesso/cluster/collecting.py",
        "rollout = rollout.rows(index.argsort())",
        "pass",
        "tests/cluster/test_local.py -k order_of_the_request",
    ),
    Mutant(
        "cluster-max-failed",
        "gesso/cluster/driver.py",
        "if share > allowed or",
        "if share >= 1 or",
        "tests/rewards/test_robustness.py -k share",
    ),
    Mutant(
        "cluster-failed-greedy-baseline",
        "gesso/cluster/collecting.py",
        "if baseline.ok",
        "if True",
        "tests/test_token_loop.py -k greedy",
    ),
    Mutant(
        "loop-lag",
        "gesso/loop.py",
        "len(pending) <= self.recipe.lag and",
        "len(pending) < 1 and",
        "tests/test_loop.py -k lag_one",
    ),
    Mutant(
        "loop-resumes-without-publishing",
        "gesso/loop.py",
        "self.cluster.publish(latest)",
        "self.cluster.publish(0)",
        "tests/cluster/test_local.py -k resumed",
    ),
    Mutant(
        "loop-stops-after-non-finite-steps",
        "gesso/loop.py",
        "MAX_SKIPPED = 3",
        "MAX_SKIPPED = 4",
        "tests/test_loop.py -k not_finite",
    ),
    # Run folder and checkpoints
    Mutant(
        "atomic-write",
        "gesso/track/atomic.py",
        'path.with_name(f".{path.name}.new")',
        "path",
        "tests/track/test_atomic.py",
    ),
    Mutant(
        "checkpoint-kept",
        "gesso/track/checkpoints.py",
        "*others[:-keep]]:",
        "*others[:-1]]:",
        "tests/track/test_checkpoints.py",
    ),
    Mutant(
        "checkpoint-tensors-not-verified",
        "gesso/track/checkpoints.py",
        '_compare(file, digests(tensors), state["tables"], table)',
        "pass",
        "tests/track/test_damaged.py -k every_flipped_bit",
    ),
    Mutant(
        "checkpoint-state-not-verified",
        "gesso/track/checkpoints.py",
        'if sealed(meta)["digest"] != meta["digest"]:',
        "if False:",
        "tests/track/test_damaged.py -k every_flipped_bit",
    ),
    Mutant(
        "metrics-half-written-line",
        "gesso/track/run_folder.py",
        'split(b"\\n")[:-1]',
        'split(b"\\n")',
        "tests/track/test_damaged.py -k 'rows'",
    ),
    # Rewards
    Mutant(
        "reward-failed-part-is-left-out",
        "gesso/rewards/compose.py",
        "if score.error is not None:",
        "if False:",
        "tests/rewards/test_rewards.py -k weighted_sum",
    ),
    Mutant(
        "reward-infinite",
        "gesso/rewards/base.py",
        "if not math.isfinite(value):",
        "if False:",
        "tests/rewards/test_robustness.py -k invalid_details",
    ),
    Mutant(
        "reward-number-as-text",
        "gesso/rewards/base.py",
        "if isinstance(value, str | bytes | bytearray):",
        "if False:",
        "tests/rewards/test_user_code.py -k 'hostile_reward'",
    ),
    Mutant(
        "curriculum-ignores-lag",
        "gesso/data/curriculum.py",
        "if step <= i - 1 - self.lag:",
        "if step <= i - 1:",
        "tests/data/test_curriculum.py -k survives",
    ),
    Mutant(
        "curriculum-not-restored",
        "gesso/loop.py",
        'if "curriculum" in meta:',
        "if False:",
        "tests/data/test_curriculum.py -k resumed",
    ),
    Mutant(
        "curriculum-without-floor",
        "gesso/data/curriculum.py",
        "+ floor * weight / total",
        "+ 1e-9",
        "tests/data/test_curriculum.py -k shares",
    ),
    Mutant(
        "win-rate-one-order",
        "gesso/formulas/comparisons.py",
        "result = (first + 1 - first.T) / 2",
        "result = first.copy()",
        "tests/formulas/test_comparisons.py",
    ),
    Mutant(
        "groups-in-order-of-arrival",
        "gesso/rewards/transport/service.py",
        "order = sorted(members)",
        "order = list(members)",
        "tests/rewards/test_groupwise.py -k however",
    ),
    Mutant(
        "groups-cut-into-batches",
        "gesso/rewards/transport/workers.py",
        "size = len(samples) if self.groupwise else self.batch",
        "size = self.batch",
        "tests/rewards/test_groupwise.py -k fails_alone",
    ),
    Mutant(
        "cache-key-without-options",
        "gesso/rewards/transport/cache.py",
        "self.identity = identity.encode()",
        'self.identity = b""',
        "tests/rewards/test_cache.py",
    ),
    Mutant(
        "cache-keeps-failures",
        "gesso/rewards/transport/cache.py",
        "if all(score.error is None for score in scores) and not self.inner.random:",
        "if not self.inner.random:",
        "tests/rewards/test_cache.py -k failures",
    ),
    Mutant(
        "cache-order-of-scores",
        "gesso/rewards/transport/cache.py",
        "return [score for key in keys for score in scores[key]]",
        "return [score for key in sorted(keys) for score in scores[key]]",
        "tests/rewards/test_cache.py -k order",
    ),
    Mutant(
        "workers-order-of-scores",
        "gesso/rewards/transport/batches.py",
        "for batch in scored for score in batch]",
        "for batch in reversed(scored) for score in batch]",
        "tests/rewards/test_rewards.py -k order",
    ),
    Mutant(
        "workers-fail-together",
        "gesso/rewards/transport/workers.py",
        "[score for sample in samples for score in await self._retry([sample], 2)]",
        "await self._retry(samples, 2)",
        "tests/rewards/test_robustness.py -k fails_alone",
    ),
    Mutant(
        "pool-retries-500",
        "gesso/rewards/transport/pool.py",
        "response.status_code >= 500",
        "response.status_code > 599",
        "tests/rewards/test_faults.py -k transient_faults_are_retried",
    ),
    Mutant(
        "pool-in-flight",
        "gesso/rewards/transport/pool.py",
        "if s.busy < self.in_flight]",
        "]",
        "tests/rewards/test_faults.py -k spread_and_bounded",
    ),
    Mutant(
        "pool-attempts",
        "gesso/rewards/transport/pool.py",
        "in range(self.retries + 1):",
        "in range(self.retries):",
        "tests/rewards/test_faults.py -k attempts_and_time",
    ),
    Mutant(
        "reward-server-token",
        "gesso/rewards/transport/serve.py",
        "if token is not None and not hmac",
        "if token is None and not hmac",
        "tests/rewards/test_http.py -k no_token",
    ),
    # Config and data
    Mutant(
        "config-unknown-key",
        "gesso/config/base.py",
        'frozen=True, extra="forbid"',
        'frozen=True, extra="ignore"',
        "tests/test_config.py -k every_mistake",
    ),
    Mutant(
        "config-override-order",
        "gesso/config/tables.py",
        "for override in overrides:",
        "for override in reversed(overrides):",
        "tests/test_config.py -k overrides",
    ),
    Mutant(
        "config-base-of-another-kind",
        "gesso/config/tables.py",
        'for key in ("name", "kind")):',
        'for key in ("name",)):',
        "tests/test_config.py -k 'base or kind'",
    ),
    Mutant(
        "data-weights-of-sources",
        "gesso/data/prompts.py",
        "[total / Fraction(weight) for weight in weights]",
        "[Fraction(len(weights)) for weight in weights]",
        "tests/data/test_prompts.py -k mix",
    ),
    Mutant(
        "data-sources-shuffled-alike",
        "gesso/data/prompts.py",
        '(self.seed, "data", turn, source) if source else',
        '(self.seed, "data", turn) if source else',
        "tests/data/test_prompts.py -k mix",
    ),
    Mutant(
        "data-held-out-overlap",
        "gesso/data/prompts.py",
        "if _identity(p) in trained]",
        "if p in train]",
        "tests/data/test_prompts.py -k 'overlap or question'",
    ),
    Mutant(
        "data-shard-order",
        "gesso/data/splits.py",
        "for _, file in sorted(files)]",
        "for _, file in files]",
        "tests/data/test_splits.py -k order",
    ),
    Mutant(
        "data-missing-shard",
        "gesso/data/splits.py",
        "if not numbers or numbers == list(range(chosen.count)):",
        "if not numbers or numbers:",
        "tests/data/test_splits.py -k incomplete_download",
    ),
    # Health
    Mutant(
        "health-flat-groups",
        "gesso/health/__init__.py",
        "FLAT = 0.5",
        "FLAT = 0.95",
        "tests/test_health.py -k test_flat_groups",
    ),
    Mutant(
        "health-warns-again",
        "gesso/health/__init__.py",
        "now - self._seen[s.kind] > REPEAT_AFTER",
        "now - self._seen[s.kind] > 0",
        "tests/test_health.py -k away",
    ),
    Mutant(
        "health-ratio",
        "gesso/health/ratio.py",
        'DISAGREE = {"float32": 0.01,',
        'DISAGREE = {"float32": 1.0,',
        "tests/test_health.py -k ratio_not_one",
    ),
    # Viewer, use, memory, trust, command line
    Mutant(
        "viewer-path-traversal",
        "gesso/viewer/files.py",
        "if not pattern.fullmatch(name):",
        "if not name:",
        "tests/viewer/test_server.py -k nothing_but_images",
    ),
    Mutant(
        "viewer-links",
        "gesso/viewer/files.py",
        "if any(step.is_symlink() for step in steps) or",
        "if",
        "tests/viewer/test_server.py -k links_out",
    ),
    Mutant(
        "viewer-token",
        "gesso/viewer/server.py",
        "return hmac.compare_digest(given.encode(), token.encode())",
        "return True",
        "tests/viewer/test_server.py -k token",
    ),
    Mutant(
        "viewer-other-origin",
        "gesso/viewer/server.py",
        "if origin and request.method",
        "if not origin and request.method",
        "tests/viewer/test_server.py -k another_page",
    ),
    Mutant(
        "server-host",
        "gesso/serving.py",
        "if not is_loopback(host) and not token:",
        "if not host:",
        "tests/rewards/test_http.py -k mistakes",
    ),
    Mutant(
        "use-averaged-weights",
        "gesso/use/source.py",
        'return "ema" if requested != "current" and',
        'return "ema" if requested == "ema" and',
        "tests/test_settings.py -k averaged",
    ),
    Mutant(
        "export-precision",
        "gesso/use/export.py",
        "t.to(torch_dtype) if t.is_floating_point() else t",
        "t",
        "tests/use/test_export.py -k another_precision",
    ),
    Mutant(
        "memory-adam",
        "gesso/estimate.py",
        '"optimizer": 2 * trained,',
        '"optimizer": trained,',
        "tests/memory/test_estimates.py -k full_fine_tune",
    ),
    Mutant(
        "features-sent-to-other-ranks",
        "gesso/cluster/exchanging.py",
        'return values | {f"{FEATURES}{key}": features for key, features in found.items()}',
        "return values",
        "tests/models/test_tokens.py -k prompts_and_features_of_images",
    ),
    Mutant(
        "memory-of-a-sampler",
        "gesso/estimate.py",
        'lasting |= {"optimizer": 0, ',
        "lasting |= {",
        "tests/memory/test_sharded.py -k separate",
    ),
    Mutant(
        "plan-memory-of-each-row",
        "gesso/plan/planner.py",
        "(cluster.shard_within or cluster.workers)",
        "cluster.shard_within",
        "tests/memory/test_sharded.py -k each_row",
    ),
    Mutant(
        "plan-memory-without-number-of-workers",
        "gesso/plan/planner.py",
        "key += (cluster.workers,)",
        "key += ()",
        "tests/plan/test_plan.py -k single_micro_batch",
    ),
    Mutant(
        "memory-sum-before-the-first-pass",
        "gesso/estimate.py",
        "EXACT_SUM if _several_passes(recipe, load) else 0",
        "EXACT_SUM",
        "tests/memory/test_peaks.py -k nft",
    ),
    Mutant(
        "sum-allocated-early",
        "gesso/learner/gradient_sum.py",
        "        self._not_finite = torch.zeros((), dtype=torch.int64, device=device)\n",
        "        self._not_finite = torch.zeros((), dtype=torch.int64, device=device)\n"
        "        _ = self._sums\n",
        "tests/memory/test_peaks.py -k nft",
    ),
    Mutant(
        "plan-slower-alone",
        "gesso/plan/cores.py",
        "task.slower if len(self._running) > 1 else 1.0",
        "task.slower",
        "tests/plan/test_plan.py -k only_together",
    ),
    Mutant(
        "plan-idle-workers-take-cores",
        "gesso/plan/cores.py",
        "self.cores / max(1, len(self._running))",
        "self.cores / 4",
        "tests/plan/test_plan.py -k only_while_they_work",
    ),
    Mutant(
        "plan-measures-cached-scores",
        "gesso/plan/measure.py",
        '{"cache": False}',
        "{}",
        "tests/plan/test_plan.py -k real_steps",
    ),
    Mutant(
        "plan-memory-of-one-worker",
        "gesso/plan/planner.py",
        "max(n for n in self.measured if n <= workers)",
        "1",
        "tests/plan/test_plan.py -k memory_on_this_machine",
    ),
    Mutant(
        "plan-micro-batches-of-the-mean",
        "gesso/plan/planner.py",
        "math.ceil((mean + more) / 2)",
        "0",
        "tests/plan/test_plan.py -k even_although",
    ),
    Mutant(
        "memory-update-not-folded",
        "gesso/memory/flow.py",
        "with model.policy.folded():\n            algorithm.loss",
        "if True:\n            algorithm.loss",
        "tests/memory/test_estimates.py -k folds",
    ),
    Mutant(
        "memory-estimated-without-compiling",
        "gesso/models/flow/compiled.py",
        'or (device.type == "meta" and settings.dtype != "float32")',
        "",
        "tests/memory/test_presets.py -k measured_peak",
    ),
    Mutant(
        "attention-mask-forgotten",
        "gesso/models/flow/attention.py",
        "(*cast, inputs[3])",
        "(*cast, None)",
        "tests/models/test_repeatable.py -k 'use_it and qwen'",
    ),
    Mutant(
        "sana-instructs-negative-prompts",
        "gesso/models/flow/sana.py",
        "None if prompt.is_negative else self.instruction",
        "self.instruction",
        "tests/models/test_pipelines.py -k 'own_pipeline and sana'",
    ),
    Mutant(
        "compiled-prompts-of-any-length",
        "gesso/models/flow/qwen_image.py",
        "cond = cond.padded(-(-cond.embeds.shape[1] // self.text_length) * self.text_length)",
        "",
        "tests/models/test_compiled.py -k 'folded_and_compiled and qwen'",
    ),
    Mutant(
        "memory-longest-prompt",
        "gesso/families/token_checks.py",
        "tokens=max(lengths)",
        "tokens=min(lengths)",
        "tests/memory/test_estimates.py -k longest",
    ),
    Mutant(
        "memory-largest-prompt",
        "gesso/families/input_images.py",
        "most = max(prompts",
        "most = min(prompts",
        "tests/memory/test_estimates.py -k input_images",
    ),
    Mutant(
        "memory-plan-without-images",
        "gesso/plan/planner.py",
        "estimate(placed, role, self.images)",
        "estimate(placed, role, None)",
        "tests/plan/test_plan.py -k input_images",
    ),
    Mutant(
        "memory-fit-without-images",
        "gesso/fitting.py",
        "images=assumed.images",
        "images=None",
        "tests/memory/test_estimates.py -k input_images",
    ),
    Mutant(
        "memory-text-of-several-images",
        "gesso/models/flow/qwen_edit.py",
        "self.text_length + 1) * self.text_length",
        "self.text_length + 1) and self.text_length",
        "tests/models/test_editing.py -k blank",
    ),
    Mutant(
        "given-clip-not-continued",
        "gesso/data/rows.py",
        "load_images(images, folder) or first",
        "load_images(images, folder) and first",
        "tests/data/test_given.py -k continues",
    ),
    Mutant(
        "trust-code-of-a-run",
        "gesso/viewer/studio.py",
        "code = {} if self.trust_code else",
        "code = {} if True else",
        "tests/test_trust.py -k 'playground or page_of_a_foreign'",
    ),
    Mutant(
        "trust-working-folder-first",
        "gesso/imports.py",
        'return [entry for entry in sys.path if entry not in ("", folder)] + [folder]',
        'return [folder] + [entry for entry in sys.path if entry not in ("", folder)]',
        "tests/test_trust.py -k beside_files",
    ),
    Mutant(
        "cli-resume-changes-the-recipe",
        "gesso/commands.py",
        "if options.run or not known or",
        "if options.run or",
        "tests/test_cli.py -k mistakes",
    ),
    Mutant(
        "cli-unknown-argument",
        "gesso/cli.py",
        'unknown = any(r.startswith("-") for r in rest) or',
        "unknown =",
        "tests/test_cli.py -k mistakes",
    ),
    # Repeatable runs on a GPU
    Mutant(
        "attention-of-the-outer-graph-only",
        "gesso/models/flow/attention.py",
        "for module in traced.modules():",
        "for module in [traced]:",
        "tests/models/test_repeatable.py -k compiled_blocks",
    ),
    Mutant(
        "kernels-chosen-by-timing",
        "gesso/models/repeatable.py",
        '{"deterministic": True}',
        '{"deterministic": False}',
        "tests/models/test_repeatable.py -k timing",
    ),
    Mutant(
        "update-without-deterministic-algorithms",
        "gesso/learner/learner.py",
        "with self.policy.folded(), deterministic_algorithms(self.model):",
        "with self.policy.folded():",
        "tests/models/test_repeatable.py -k strict_models",
    ),
    Mutant(
        "one-pass-without-deterministic-algorithms",
        "gesso/samplers/one_pass.py",
        "with grads as weights, deterministic_algorithms(self.model):",
        "with grads as weights:",
        "tests/models/test_repeatable.py -k strict_models",
    ),
    Mutant(
        "check-always-repeats",
        "gesso/check.py",
        "gradients[0] == gradients[1]",
        "True",
        "tests/test_cli.py -k repeats",
    ),
    # Workers
    Mutant(
        "ray-task-twice",
        "gesso/cluster/actor.py",
        "            if number >= self._begun:",
        "            if True:",
        "tests/cluster/test_ray_calls.py",
    ),
    Mutant(
        "ray-stale-attempt",
        "gesso/cluster/actor.py",
        "return self._attempts.get(number) != attempt",
        "return False",
        "tests/cluster/test_ray_calls.py",
    ),
    Mutant(
        "ray-messages-kept",
        "gesso/cluster/actor.py",
        "self._dropped = max(received, self._dropped)",
        "pass",
        "tests/cluster/test_ray_calls.py",
    ),
    Mutant(
        "ray-early-call",
        "gesso/cluster/actor.py",
        "max(received, self._dropped, *self._ends[number : number + 1])",
        "max(received, self._dropped)",
        "tests/cluster/test_ray_calls.py",
    ),
    Mutant(
        "ray-attempt",
        "gesso/cluster/ray_actors.py",
        "call.attempt += 1",
        "pass",
        "tests/cluster/test_ray_calls.py",
    ),
    Mutant(
        "ray-received",
        "gesso/cluster/ray_actors.py",
        "self._received += 1",
        "pass",
        "tests/cluster/test_ray_calls.py",
    ),
    Mutant(
        "ray-node-ended",
        "gesso/cluster/ray_actors.py",
        "if self._node.refuses():",
        "if False:",
        "tests/cluster/test_ray_calls.py",
    ),
    Mutant(
        "ray-shut",
        "gesso/cluster/ray_actors.py",
        "self._shut.set()",
        "pass",
        "tests/cluster/test_ray_calls.py",
    ),
    Mutant(
        "ray-refused",
        "gesso/cluster/ray_nodes.py",
        "except ConnectionRefusedError:\n            return True",
        "except ConnectionRefusedError:\n            return False",
        "tests/cluster/test_ray_calls.py",
    ),
    Mutant(
        "plan-possible",
        "gesso/plan/planner.py",
        "learners > 0 and learners % within == 0",
        "learners > 0",
        "tests/plan/test_plan.py",
    ),
    Mutant(
        "plan-placed",
        "gesso/plan/planner.py",
        "self._compared(placed[0], n)[0]",
        "self._compared(self.recipe, n)[0]",
        "tests/plan/test_plan.py",
    ),
    Mutant(
        "exact-sum-fine",
        "gesso/learner/gradient_sum.py",
        "add_(fine.double(), alpha=1 / FINE)",
        "add_(fine.double(), alpha=0)",
        "tests/learner/test_gradient_sum.py",
    ),
    Mutant(
        "exact-sum-largest",
        "gesso/learner/gradient_sum.py",
        "~(values.abs().max() < LARGEST)",
        "values.abs().max() > LARGEST",
        "tests/learner/test_gradient_sum.py",
    ),
    Mutant(
        "deal-costs",
        "gesso/ranks.py",
        "key=lambda i: (-costs[i], i)",
        "key=lambda i: i",
        "tests/learner/test_gradient_sum.py",
    ),
    Mutant(
        "shard-root-gathered",
        "gesso/weights/sharding.py",
        "            reshard_after_forward=True,\n",
        "",
        "tests/weights/test_sharding.py",
    ),
    Mutant(
        "shard-copies-by-pointer",
        "gesso/weights/policy.py",
        "self._copies = sharding.ShardedCopies(self.trainable)",
        "self._copies = NamedCopies(self.trainable)",
        "tests/weights/test_sharding.py",
    ),
    Mutant(
        "shard-whole-kept",
        "gesso/weights/policy.py",
        "            self.folding = LoraFolding({}, self._copies)",
        "            self.folding = self.folding",
        "tests/weights/test_sharding.py",
    ),
    Mutant(
        "shard-gradient-mean",
        "gesso/weights/sharding.py",
        "sharded.set_gradient_divide_factor(1.0)",
        "pass",
        "tests/cluster/test_workers.py -k sharding_all",
    ),
    Mutant(
        "shard-buckets-pile-up",
        "gesso/cluster/transfer.py",
        "            del whole  # before the next bucket is gathered\n",
        "",
        "tests/weights/test_sharding.py -k bucket_by_bucket",
    ),
    Mutant(
        "shard-spare-passes",
        "gesso/ranks.py",
        "max(dealt) - len(mine) if ranks.in_step else 0",
        "0",
        "tests/learner/test_gradient_sum.py",
    ),
    Mutant(
        "shard-spare-gradient",
        "gesso/learner/learner.py",
        "(0 * self.algorithm.loss",
        "(1 * self.algorithm.loss",
        "tests/cluster/test_workers.py -k sharding_all",
    ),
    Mutant(
        "shard-estimate",
        "gesso/memory/sharded.py",
        "return self.rest + (ARRIVING + self.overlaps) * self.block",
        "return 0",
        "tests/memory/test_sharded.py -k one_block",
    ),
    Mutant(
        "ranks-finite",
        "gesso/learner/learner.py",
        "finite = total.write() and not not_finite",
        "finite = not not_finite or total.write()",
        "tests/learner/test_learner.py",
    ),
    Mutant(
        "parts-whole-prompts",
        "gesso/samplers/base.py",
        "while row[stop - 1] == row[stop]:",
        "while False:",
        "tests/samplers/test_decode.py -k cut_at_prompts",
    ),
    Mutant(
        "workers-digests",
        "gesso/cluster/workers.py",
        "if found != digests[0]:",
        "if not found:",
        "tests/cluster/test_workers.py -k different_weights",
    ),
    Mutant(
        "workers-piece-order",
        "gesso/worker.py",
        "index = [starts[i] + j for i, j in rows]",
        "index = sorted(starts[i] + j for i, j in rows)",
        "tests/cluster/test_workers.py -k failed",
    ),
    Mutant(
        "workers-life",
        "gesso/cluster/channel.py",
        "        time.sleep(grace)\n        os._exit(1)",
        "        time.sleep(grace)",
        "tests/cluster/test_workers.py -k busy_worker",
    ),
    Mutant(
        "launched-signals",
        "gesso/cluster/launched.py",
        "signal.signal(number, signal.SIG_IGN)",
        "signal.signal(number, signal.SIG_DFL)",
        "tests/cluster/test_launched.py -k ends_with_it",
    ),
    Mutant(
        "launched-output",
        "gesso/cluster/launched.py",
        "        os.dup2(writing, stream)",
        "        pass",
        "tests/cluster/test_launched.py -k ends_with_it",
    ),
    Mutant(
        "launched-count",
        "gesso/cluster/placement.py",
        'if launch is not None and wanted not in ("auto", launch.count):',
        "if launch is not None and wanted is None:",
        "tests/cluster/test_launched.py -k another_number",
    ),
    Mutant(
        "a-lost-node-takes-learners",
        "gesso/cluster/placement.py",
        "min(samplers, max(parallel, (found - learners) // parallel * parallel))",
        "min(samplers, found - 1)",
        "tests/cluster/test_apart.py -k fewer_samplers",
    ),
    Mutant(
        "half-an-engine-lost",
        "gesso/cluster/separate.py",
        "self.sampling.drop(lost[0], needed",
        "self.sampling.drop([error.rank], needed",
        "tests/cluster/test_vllm_workers.py -k lost_together",
    ),
    Mutant(
        "shards-not-verified",
        "gesso/track/checkpoints.py",
        "        _compare(folder / name, computed, expected, table)",
        "        pass",
        "tests/cluster/test_workers.py -k any_number_of_workers",
    ),
    Mutant(
        "background-save-without-a-copy",
        "gesso/track/checkpoints.py",
        'tensor.detach().clone() if tensor.device.type == "cpu"',
        'tensor.detach() if tensor.device.type == "cpu"',
        "tests/test_loop.py -k written_while",
    ),
    Mutant(
        "finished-before-it-is-written",
        "gesso/track/checkpoints.py",
        "            writing.finish()\n",
        "",
        "tests/test_loop.py -k written_while",
    ),
    Mutant(
        "sampled-from-other-weights",
        "gesso/cluster/saving.py",
        'state = self._read(path, f"{table}/")',
        'state = self._read(path, "current/")',
        "tests/cluster/test_workers.py -k 'sampled_from and nft'",
    ),
    Mutant(
        "playground-on-one-worker",
        "gesso/use/in_workers.py",
        "batch = -(-len(row) // PARTS)",
        "batch = len(row)",
        "tests/cluster/test_workers.py -k playground",
    ),
    Mutant(
        "card-several-gpus",
        "gesso/config/tables.py",
        '{"cluster": {"workers": gpus}}',
        '{"cluster": {}}',
        "tests/test_cards.py -k several",
    ),
    Mutant(
        "card-none",
        "gesso/config/tables.py",
        "for card in ordered if cards[card] != NOTHING",
        "for card in ordered",
        "tests/test_cards.py -k 'has_its_cards or loads'",
    ),
]


def occurrences(mutant: Mutant) -> int:
    return (ROOT / mutant.file).read_text("utf-8").count(mutant.old)


def copy_of_the_tree(folder: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", ".git", "runs", "results")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy2(source, folder / name)
    # Compared with the source by content: a mutant may be as long as the text it replaces.
    hashed = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(folder / "gesso", quiet=1, invalidation_mode=hashed)


def use_copy(folder: Path) -> None:
    """This process, a fork, and those it starts import the copy."""
    os.environ["PYTHONPATH"] = str(folder)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    elsewhere = folder.with_suffix(".cwd")  # Gesso puts the working folder last on the import path
    elsewhere.mkdir(exist_ok=True)
    os.chdir(elsewhere)
    sys.path[:] = [str(folder), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
    for name in [n for n in sys.modules if n == "tests" or n.startswith("tests.")]:
        del sys.modules[name]
    assert not any(n == "gesso" or n.startswith("gesso.") for n in sys.modules)


def assert_copy_is_imported(folder: Path) -> None:
    """Here, and in a new interpreter."""
    import gesso

    command = [sys.executable, "-c", "import gesso; print(gesso.__file__)"]
    child = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    for file in (gesso.__file__, child):
        assert Path(str(file)).is_relative_to(folder), f"imported {file}, expected the copy"


@dataclass
class Run:
    """pytest over a selection in a forked process."""

    pid: int
    copy: Path
    tests: str
    mutant: Mutant | None
    started: float
    output: Path

    def finished(self) -> int | None:
        """pytest's exit status; None while it runs, 1 if it had to be killed."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() - self.started < LIMIT:
            return None
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return 1


def start(copy: Path, tests: str, mutant: Mutant | None) -> Run:
    output = copy.with_suffix(".txt")
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return Run(pid, copy, tests, mutant, time.monotonic(), output)
    status = 70
    try:
        os.setsid()
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        use_copy(copy)
        if mutant is None:
            assert_copy_is_imported(copy)
        import pytest

        words = [str(copy / w) if w.startswith("tests/") else w for w in shlex.split(tests)]
        options = ["-x", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
        where = ["--rootdir", str(copy), "-c", str(copy / "pyproject.toml")]
        status = int(pytest.main([*options, *where, *words]))
    except BaseException as error:
        print(f"{type(error).__name__}: {error}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_all(
    work: Sequence[tuple[str, Mutant | None]], copies: Sequence[Path]
) -> Iterator[tuple[Run, int, float]]:
    """Every run with its exit status and seconds, as they finish."""
    waiting, free = list(work), list(copies)
    running: list[Run] = []
    try:
        while waiting or running:
            while waiting and free:
                tests, mutant = waiting.pop(0)
                copy = free.pop()
                if mutant is not None:
                    replace(copy / mutant.file, mutant.old, mutant.new)
                running.append(start(copy, tests, mutant))
            for run in list(running):
                status = run.finished()
                if status is None:
                    continue
                running.remove(run)
                free.append(run.copy)
                if run.mutant is not None:
                    shutil.copy2(ROOT / run.mutant.file, run.copy / run.mutant.file)
                yield run, status, time.monotonic() - run.started
            time.sleep(0.02)
    finally:
        for run in running:
            os.killpg(run.pid, signal.SIGKILL)
            os.waitpid(run.pid, 0)


def replace(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text("utf-8").replace(old, new), "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("words", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("-j", type=int, default=2, help="runs at a time")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="show why pytest failed")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.words or any(w in m.name for w in options.words)]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:<36} {mutant.file:<40} {mutant.tests}")
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"
    gone = [m for m in chosen if occurrences(m) != 1]
    for mutant in gone:
        print(f"{mutant.name}: its text occurs {occurrences(mutant)} times in {mutant.file}")
    chosen = [m for m in chosen if m not in gone]
    for module in PRELOADED:
        importlib.import_module(module)
    failed, survived, noticed = list[str](), list[str](), 0
    with tempfile.TemporaryDirectory(prefix="gesso-mutants-") as folder:
        copies = [Path(folder).resolve() / f"copy{i}" for i in range(options.j)]
        for copy in copies:
            copy.mkdir()
            copy_of_the_tree(copy)
        selections = list(dict.fromkeys(m.tests for m in chosen))
        print(f"{len(selections)} selections of tests without a mutant", flush=True)
        for run, status, seconds in run_all([(tests, None) for tests in selections], copies):
            if status != 0:
                failed.append(run.tests)
                print(f"FAILED (status {status}) {seconds:5.1f} s  {run.tests}")
                print(run.output.read_text("utf-8", "replace")[-SHOWN:], flush=True)
        work = [(m.tests, m) for m in chosen if m.tests not in failed]
        for run, status, seconds in run_all(work, copies):
            assert run.mutant is not None
            words = {0: "SURVIVED", 1: "noticed"}.get(status, f"BROKEN (status {status})")
            print(f"{words:<10} {seconds:5.1f} s  {run.mutant.name}", flush=True)
            noticed += status == 1
            if status != 1:
                survived.append(run.mutant.name)
            if options.verbose or status not in (0, 1):
                print(run.output.read_text("utf-8", "replace")[-SHOWN:], flush=True)
    print(f"{noticed} of {len(chosen) + len(gone)} mutants noticed")
    return 1 if gone or failed or survived else 0


if __name__ == "__main__":
    sys.exit(main())

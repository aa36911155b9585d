"""Compares one iteration (sample, score, update) of Gesso and of a plain script.

    python benchmarks/demo_iteration.py [--recipe demo] [--rounds 5] [--json FILE] [key=value ...]

The plain side uses diffusers, autograd and a thread pool for the reward, as in Flow-GRPO's script.
Before timing, both sides must give the same results on one batch; if they do not, the exit status
is 1 and nothing is timed. benchmarks/README.md explains the output.
"""

from __future__ import annotations

import gesso  # before torch: sets how OpenMP threads wait

# isort: split
import argparse
import functools
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from unscored import Unscored, made_up

from gesso import build
from gesso.algorithms.advantage import Advantage
from gesso.algorithms.flow_grpo import FlowGRPO
from gesso.cluster.collecting import PendingStep
from gesso.cluster.local import Local
from gesso.config import Model, Recipe, resolve_path
from gesso.formulas.text import spelling
from gesso.models.flow.sd3 import SD3
from gesso.rewards.image.ocr import target_of
from gesso.rewards.transport.service import RewardService
from gesso.rollout import Rollout
from gesso.run import Assembled, assemble
from gesso.types import (
    Prompt,
    SampleSpec,
    Score,
    UserError,
    Weights,
    seed_of,
)

PLAIN_DOES = {"rule": "flow-sde", "guidance": 1.0, "updates": 1, "beta": 0.0, "same_noise": False}
PLAIN_DOES["advantage"] = Advantage().model_dump()
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "numpy", "onnxruntime", "rapidocr")
PHASES: tuple[str, ...] = ("text encoders", "transformer", "decoder", "rest of sampling")
PHASES += ("waiting for scores", "update", "total")
Proof = dict[str, tuple[float, float]]  # name → difference and its limit
Times = dict[str, float]  # seconds of one iteration by phase
MIN_SHARE = 0.85  # of a recorded ratio


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def clock(pipe: Any) -> Counter[str]:
    """Measures the seconds inside a pipeline's networks by hooks, the same for both sides."""
    seconds: Counter[str] = Counter()
    encoders = (pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3)
    networks = [("text encoders", e) for e in encoders if e is not None]
    networks += [("transformer", pipe.transformer), ("decoder", pipe.vae.decoder)]
    for name, network in networks:
        network.register_forward_pre_hook(lambda *_, n=name: seconds.update({n: -now()}))
        network.register_forward_hook(lambda *_, n=name: seconds.update({n: now()}))
    return seconds


class Gesso:
    """Gesso's classes, unchanged."""

    def __init__(self, job: Assembled) -> None:
        self.job, self.start = job, {n: t.clone() for n, t in job.learner.policy.tensors().items()}
        assert isinstance(job.model, SD3)
        self.clock = clock(job.model.pipe)
        unscored = cast(RewardService, Unscored())
        parts = (job.recipe, job.learner, job.local.sampler, unscored, job.cluster.stream)
        self.unscored = Local(*parts)

    def reset(self) -> None:
        self.job.learner.policy.load(self.start)

    def sample(self, step: int, scored: bool) -> PendingStep:
        return (self.job.cluster if scored else self.unscored).sample_step(step)

    def gather(self, drawn: PendingStep) -> Rollout:
        return drawn.result()[0]

    def update(self, rollout: Rollout, step: int) -> float:
        metrics = self.job.learner.update(rollout, step).metrics
        for cluster in (self.job.cluster, self.unscored):
            cluster.publish(step + 1)
        return metrics["update/grad_norm"]


@dataclass
class Batch:
    """One batch of the plain script; it stores latents and log-probs of all steps."""

    embeds: Tensor  # (N, L, D)
    pooled: Tensor  # (N, D')
    latents: list[Tensor]  # steps+1 of (N, C, H, W)
    logp: list[Tensor]  # steps of (N,)
    images: np.ndarray  # (N, height, width, 3) uint8
    rewards: Callable[[], np.ndarray]  # (N,); waits for scoring


Gathered = tuple[list[Batch], np.ndarray]  # and all rewards


def sde_step(
    x: Tensor, v: Tensor, sigmas: Tensor, i: int, level: float, x_next: Tensor | Callable
) -> tuple[Tensor, Tensor]:
    """Flow-GRPO's step i to a given x' or with noise from a call: (x', log-prob (N,))."""
    sigma, dt = sigmas[i], sigmas[i + 1] - sigmas[i]
    s = level * torch.sqrt(sigma / (1 - (sigmas[1] if sigma == 1 else sigma)))
    mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
    std = s * torch.sqrt(-dt)
    x_next = x_next if isinstance(x_next, Tensor) else mean + std * x_next()
    logp = -((x_next.detach() - mean) ** 2) / (2 * std**2) - torch.log(std) - np.log(2 * np.pi) / 2
    return x_next, logp.mean(dim=(1, 2, 3))


def recogniser(recipe: Recipe) -> Any:
    """With the settings of gesso/rewards/image/ocr.py and onnxruntime's default threads."""
    from rapidocr import RapidOCR

    detect, model = recipe.reward[0].options["detect"], recipe.model
    assert isinstance(model, Model)
    strip = 320 if detect else min(320, -(-48 * model.width // model.height))
    parts = {"use_cls": False, "use_det": detect, "log_level": "error"}
    params = {f"Global.{name}": value for name, value in parts.items()}
    params |= {"Det.limit_side_len": 64, "Det.limit_type": "min"}
    return RapidOCR(params=params | {"Rec.rec_img_shape": [3, 48, strip]})


class Plain:
    """A plain script: one prompt's group per batch, one denoising step per pass."""

    def __init__(
        self, job: Assembled, start: Weights, batch: int | None = None, reward: str = "threads"
    ):
        from diffusers import StableDiffusion3Pipeline
        from diffusers.utils.logging import disable_progress_bar
        from peft import LoraConfig

        disable_progress_bar()
        self.recipe, self.start, self.reward = job.recipe, start, reward
        self.stream, self.device = job.cluster.stream, job.model.device
        options, kind = self.recipe.algorithm.options, self.recipe.algorithm.name
        fits = kind == "flow-grpo" and all(options[k] == v for k, v in PLAIN_DOES.items())
        if not fits or [r.name for r in self.recipe.reward] != ["ocr"] or self.recipe.learner.ema:
            raise UserError(
                f"expected flow-grpo with {PLAIN_DOES}, the reward ocr and no EMA: the plain side "
                "supports nothing else"
            )
        assert isinstance(job.algorithm, FlowGRPO) and isinstance(job.model, SD3)
        assert isinstance(job.recipe.model, Model)
        self.algorithm, self.batch = job.algorithm, batch or job.algorithm.group
        self.model = job.recipe.model
        if self.recipe.model.dtype != "float32" or len(self.plan(0)[0]) % self.batch:
            raise UserError(
                "the plain side needs float32 and a --plain-batch that divides its samples"
            )
        absent = {name: None for name, part in job.model.pipe.components.items() if part is None}
        path = resolve_path(self.recipe.model.path)
        self.pipe = StableDiffusion3Pipeline.from_pretrained(path, **absent).to(self.device)
        if lora := self.recipe.model.lora:
            self.pipe.transformer.requires_grad_(False)
            targets = lora.targets or list(SD3.lora_targets)
            adapter = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets)
            self.pipe.transformer.add_adapter(adapter)
        named = self.pipe.transformer.named_parameters()
        self.trained = {name: p for name, p in named if p.requires_grad}
        rates = self.recipe.optimizer.model_dump(include={"lr", "betas", "eps", "weight_decay"})
        self.optimizer = torch.optim.AdamW(self.trained.values(), **rates)
        self.pool, self.ocr = ThreadPoolExecutor(max_workers=8), recogniser(self.recipe)
        self.clock = clock(self.pipe)

    @torch.no_grad()
    def reset(self) -> None:
        assert self.trained.keys() == self.start.keys()
        for name, tensor in self.start.items():
            self.trained[name].copy_(tensor)

    def plan(self, step: int) -> tuple[list[Prompt], list[int], SampleSpec]:
        """Prompts, seeds and stochastic window of Gesso's batch `step`."""
        seed = self.recipe.seed
        prompts = self.stream.batch(step, self.recipe.data.groups)
        repeated = [p for p in prompts for _ in range(self.algorithm.group)]
        seeds = [seed_of(seed, "sample", step, i) for i in range(len(repeated))]
        spec = self.algorithm.spec(step, seed_of(seed, "spec", step), self.model)
        return repeated, seeds, spec

    def sample(self, step: int, scored: bool) -> list[Batch]:
        prompts, seeds, spec = self.plan(step)
        parts = [slice(i, i + self.batch) for i in range(0, len(prompts), self.batch)]
        return [self.draw(prompts[part], seeds[part], spec, scored) for part in parts]

    @torch.no_grad()
    def draw(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], spec: SampleSpec, scored: bool
    ) -> Batch:
        from diffusers.utils.torch_utils import randn_tensor

        pipe, config = self.pipe, self.pipe.vae.config
        size = [side // pipe.vae_scale_factor for side in (spec.height, spec.width)]
        shape = (len(prompts), pipe.transformer.config.in_channels, *size)
        streams = [torch.Generator().manual_seed(seed) for seed in seeds]
        noise = functools.partial(randn_tensor, shape, generator=streams, device=self.device)
        settings = {"device": self.device, "max_sequence_length": self.model.text_length}
        embeds, _, pooled, _ = pipe.encode_prompt(
            [p.text for p in prompts], None, None, do_classifier_free_guidance=False, **settings
        )
        pipe.scheduler.set_timesteps(spec.steps, device=self.device)
        sigmas, x = pipe.scheduler.sigmas, noise()
        latents, logps = [x], []
        for i in range(spec.steps):
            v = self.velocity(x, i, embeds, pooled)
            if i in spec.stochastic:
                x, logp = sde_step(x, v, sigmas, i, spec.noise, noise)
            else:
                x, logp = x + v * (sigmas[i + 1] - sigmas[i]), x.new_zeros(len(x))
            latents.append(x)
            logps.append(logp)
        pixels = pipe.vae.decode(x / config.scaling_factor + config.shift_factor)[0]
        unit = pipe.image_processor.postprocess(pixels, output_type="pt")
        images = (unit * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
        rewards: Callable[[], Any] = functools.partial(self.score, images, prompts)
        if not scored:
            rewards = functools.partial(made_up, len(prompts))
        elif self.reward == "threads":
            rewards = self.pool.submit(rewards).result
        return Batch(embeds, pooled, latents, logps, images, rewards)

    def velocity(self, x: Tensor, i: int, embeds: Tensor, pooled: Tensor) -> Tensor:
        timestep = self.pipe.scheduler.timesteps[i].expand(len(x))
        parts = {"encoder_hidden_states": embeds, "pooled_projections": pooled}
        return self.pipe.transformer(x, timestep=timestep, return_dict=False, **parts)[0]

    def score(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        results = [self.ocr(np.ascontiguousarray(image[:, :, ::-1])) for image in images]
        texts = [" ".join(result.txts or ()) for result in results]
        pairs = zip(texts, prompts, strict=True)
        return np.array([spelling(text, target_of(prompt) or "") for text, prompt in pairs])

    def gather(self, drawn: list[Batch]) -> Gathered:
        return drawn, np.concatenate([batch.rewards() for batch in drawn])

    def update(self, gathered: Gathered, step: int) -> float:
        batches, rewards = gathered
        a, spec = self.algorithm, self.plan(step)[2]
        groups = rewards.reshape(-1, a.group)
        advantages = (groups - groups.mean(axis=1, keepdims=True)) / (rewards.std() + 1e-4)
        bounded = torch.tensor(advantages).clamp(-a.advantage.clip, a.advantage.clip).float()
        rows = bounded.view(-1, self.batch).to(self.device)
        accumulation = len(batches) * len(spec.trained)
        for b, advantage in zip(batches, rows, strict=True):
            if not advantage.any():  # equal rewards: Flow-GRPO's script skips it, too
                continue
            for i in spec.trained:
                x, x_next = b.latents[i], b.latents[i + 1]
                v = self.velocity(x, i, b.embeds, b.pooled)
                logp = sde_step(x, v, self.pipe.scheduler.sigmas, i, spec.noise, x_next)[1]
                ratio = torch.exp(logp - b.logp[i])
                clipped = torch.clamp(ratio, 1 - a.clip, 1 + a.clip)
                loss = torch.maximum(-advantage * ratio, -advantage * clipped).mean()
                (loss / accumulation).backward()
        max_norm = self.recipe.optimizer.max_norm
        norm = float(torch.nn.utils.clip_grad_norm_(self.trained.values(), max_norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def gradient_of(
    optimizer: torch.optim.Optimizer, update: Callable[[], float]
) -> tuple[float, Tensor]:
    """The gradient norm that an update reports, and the clipped gradient the optimizer receives."""
    seen: list[Tensor] = []
    parameters = optimizer.param_groups[0]["params"]
    hook = optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([p.grad.flatten() for p in parameters]))
    )
    norm = update()
    hook.remove()
    return norm, seen[0]


def prove(ours: Gesso, plain: Plain) -> Proof:
    """Compares both sides on batch 0. The gradient is computed with synthetic rewards: those of an
    untrained model are all 0."""
    ours.reset()
    plain.reset()
    rollout, batches = ours.gather(ours.sample(0, True)), plain.sample(0, True)
    trained = rollout.flow_trace.steps[0]
    latents = torch.stack([torch.cat(x) for x in zip(*(b.latents for b in batches), strict=True)])
    logp = torch.stack([torch.cat(x) for x in zip(*(b.logp for b in batches), strict=True)])
    images = np.stack([s.image for s in rollout.samples]).astype(float)
    plain_images = np.concatenate([b.images for b in batches])
    steps = latents[trained[0] : trained[-1] + 2].transpose(0, 1)
    scores = plain.score(images.astype(np.uint8), [s.prompt for s in rollout.samples])
    given, rewards = rollout.rewards.numpy(), made_up(len(images))
    norm, gradient = gradient_of(
        ours.job.learner.optimizer,
        lambda: ours.update(replace(rollout, scores=[Score(float(r)) for r in rewards]), 0),
    )
    plain_norm, plain_gradient = gradient_of(
        plain.optimizer, lambda: plain.update((batches, rewards), 0)
    )
    error = float((gradient - plain_gradient).norm() / plain_gradient.norm())
    return {
        "latents of the trained steps": (
            float((steps - rollout.flow_trace.latents).abs().max()),
            1e-4,
        ),
        # Rounding of all steps: 1.5e-4 where matmuls sum in another order (aarch64).
        "latents at the end": (float((latents[-1] - rollout.flow_trace.clean).abs().max()), 5e-4),
        "log-probs": (float((logp.T[:, trained] - rollout.logp).abs().max()), 1e-4),
        "images in [0, 1], mean": (float(np.abs(images - plain_images).mean() / 255), 1e-4),
        "rewards of the same images": (float(np.abs(scores - given).max()), 0.0),
        "gradient, relative": (error, 1e-3),
        "gradient norm, relative": (abs(norm / plain_norm - 1), 1e-3),
    }


def agrees(proof: Proof) -> bool:
    return all(difference <= limit for difference, limit in proof.values())


def iteration(side: Gesso | Plain, step: int, scored: bool) -> Times:
    side.reset()
    side.clock.clear()
    started = now()
    drawn = side.sample(step, scored)
    sampled, seconds = now(), {name: side.clock[name] for name in PHASES[:3]}
    gathered = side.gather(drawn)  # type: ignore[arg-type]
    ready = now()
    side.update(gathered, step)  # type: ignore[arg-type]
    ended = now()
    rest = sampled - started - sum(seconds.values())
    ends = (rest, ready - sampled, ended - ready, ended - started)
    return seconds | dict(zip(PHASES[3:], ends, strict=True))


class Side:
    """One side in a separate process with its usual settings: Gesso applies its own at
    `import gesso`, a plain script has torch's defaults. It works only on request."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        first = "gesso" if name == "gesso" else "torch"
        code = f"import {first}, runpy; runpy.run_path({__file__!r}, run_name='__main__')"
        command = [sys.executable, "-c", code, f"--side={name}", *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def iteration(self, step: int, scored: bool) -> Times:
        assert self.process.stdin and self.process.stdout
        print(json.dumps([step, scored]), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def serve(side: Gesso | Plain) -> None:
    for line in sys.stdin:
        print(json.dumps(iteration(side, *json.loads(line))), flush=True)


def measure(sides: dict[str, Side], rounds: int) -> dict[str, list[Times]]:
    """Alternates between the sides, scored and unscored; the order is swapped every round."""
    times: dict[str, list[Times]] = defaultdict(list)
    for i in range(rounds + 1):  # round 0 warms up
        for scored in (True, False):
            for name in sorted(sides, reverse=i % 2 == 1):
                step = 1 + 2 * i + scored  # new prompts every time: none is cached
                taken = sides[name].iteration(step, scored)
                if i:
                    times[name + " unscored" * (not scored)].append(taken)
    return times


def circumstances(threads: int) -> dict[str, str]:
    """Hardware, versions, commit and command line."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    cpu = next((x.split(":")[1].strip() for x in lines if "model name" in x), platform.processor())
    git = ["git", "-C", str(Path(__file__).parent)]
    ask = functools.partial(subprocess.run, capture_output=True, text=True)
    commit = ask([*git, "rev-parse", "--short", "HEAD"]).stdout.strip()
    changed = ask([*git, "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
    return {
        "machine": f"{cpu}, {os.cpu_count()} cores, {threads} torch threads",
        "system": f"{platform.platform()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {version(name)}" for name in LIBRARIES),
        "commit": f"gesso {gesso.__version__} {commit}" + " with changes" * bool(changed),
        "command": " ".join(["python", *sys.argv]),
    }


def report(times: dict[str, list[Times]], images: int) -> dict[str, float]:
    """Prints the table and returns the ratios."""
    columns = sorted(times, key=lambda name: ("unscored" in name, name))
    print("\nseconds, median" + "".join(f"{name:>17}" for name in columns))
    middle = {c: {p: median(t[p] for t in times[c]) for p in PHASES} for c in columns}
    for phase in PHASES:
        print(f"{phase:<20}" + "".join(f"{middle[c][phase]:>17.3f}" for c in columns))
    print(f"{'images/s':<20}" + "".join(f"{images / middle[c]['total']:>17.1f}" for c in columns))
    ratios = {}
    for what, end in (("with scoring", ""), ("without scoring", " unscored")):
        pairs = zip(times["plain" + end], times["gesso" + end], strict=True)
        rounds = [plain["total"] / ours["total"] for plain, ours in pairs]
        name = f"plain / gesso, {what}"
        ratios[name] = middle["plain" + end]["total"] / middle["gesso" + end]["total"]
        print(f"{name}: {ratios[name]:.2f} (rounds {min(rounds):.2f} to {max(rounds):.2f})")
    return ratios


def fallen(ratios: dict[str, float], recorded: dict[str, float]) -> list[str]:
    """Messages about ratios that are missing or more than 15% below the recorded ones."""
    messages = []
    for name, before in recorded.items():
        now = ratios.get(name, 0.0)
        if not now >= MIN_SHARE * before:  # also catches NaN
            least = MIN_SHARE * before
            messages.append(f"{name}: {now:.2f}, recorded {before:.2f}, at least {least:.2f}")
    return messages


def recorded_here(file: Path) -> dict[str, float]:
    """Ratios for this kind of processor; they depend on it."""
    known, here = json.loads(file.read_text()), platform.machine()
    if here not in known:
        print(
            f"{file} has no ratios for {here}, only for {', '.join(known)}: nothing to compare with"
        )
    return known.get(here, {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the times of every round")
    parser.add_argument("--recorded", type=Path, help="ratios; fails if one drops by 15%%")
    parser.add_argument("--plain-batch", type=int, help="images per batch (default: one group)")
    parser.add_argument("--plain-reward", choices=("threads", "serial"), default="threads")
    parser.add_argument("--side", choices=("gesso", "plain"), help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    job = assemble(build.recipe(options.recipe, options.overrides))
    try:
        ours = Gesso(job)
        plain = Plain(job, ours.start, options.plain_batch, options.plain_reward)
        if options.side:
            serve(ours if options.side == "gesso" else plain)
            return 0
        facts = circumstances(torch.get_num_threads())
        print("\n".join(f"{name:<9} {fact}" for name, fact in facts.items()))
        proof = prove(ours, plain)
        agree = agrees(proof)
        print(f"\nresults of both sides {'agree' if agree else 'DIFFER'}; differences:")
        for name, (difference, limit) in proof.items():
            print(f"  {name:<32} {difference:.1e}, at most {limit:.0e}")
    finally:
        job.close()
    sides = {name: Side(name, sys.argv[1:]) for name in ("gesso", "plain")} if agree else {}
    try:
        times = measure(sides, options.rounds) if agree else {}
    finally:
        for side in sides.values():
            side.close()
    ratios = report(times, job.recipe.data.groups * plain.algorithm.group) if times else {}
    messages = fallen(ratios, recorded_here(options.recorded)) if options.recorded else []
    for message in messages:
        print(f"SLOWER THAN RECORDED: {message}")
    if options.json:
        options.json.write_text(json.dumps({**facts, "proof": proof, "times": times}, indent=1))
    return 0 if agree and not messages else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")

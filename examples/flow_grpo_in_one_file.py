"""Flow-GRPO (arXiv 2505.05470) in one file, from prompts to update, in plain diffusers and torch.

    python examples/flow_grpo_in_one_file.py          # one or two minutes on two CPU cores

Each iteration samples G images for each of P prompts with stochastic denoising steps, scores them,
compares each image with the others of its prompt, and makes the steps that led to better ones more
likely. Guidance, LoRA and EMA are left out. tests/test_one_file_example.py shows that Gesso
computes the same numbers. The reward printed for an iteration depends on its prompts; the
held-out one is always for the same prompts and noise.

Shapes: P prompts, G samples per prompt, N = P·G samples, T steps, C,H,W latents, L,D text.
σ goes from 1 (noise) to 0 (image) in steps of dt < 0; the network predicts v = noise − image.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline as Pipeline
from PIL import Image
from torch import Tensor
from torch.nn import Module
from torch.optim import AdamW

ZOO = Path(__file__).parent.parent / "gesso" / "zoo"
Text = tuple[Tensor, Tensor]  # embeddings (N, L, D), pooled embeddings (N, D')
Step = tuple[Tensor, Tensor, Tensor]  # μ (N, C, H, W), s√|dt| and s


@dataclass(frozen=True)
class Config:  # every field is an option of the command line
    model: str = str(ZOO / "signs")  # folder of a StableDiffusion3Pipeline
    prompts: str = str(ZOO / "prompts" / "train.txt")  # one per line; the first 8 are held out
    out: str = "flow_grpo.png"  # the held-out prompts before (left) and after (right)
    height: int = 32
    width: int = 96
    seed: int = 0
    iterations: int = 15
    groups: int = 6  # P: prompts per iteration
    group: int = 8  # G: samples per prompt
    steps: int = 5  # T: denoising steps
    noise: float = 0.7  # a: noise level of the SDE
    updates: int = 2  # optimizer steps per iteration, each on its share of the samples
    clip: float = 1e-4  # ε: small, as log-probs are means over C,H,W
    beta: float = 0.0  # β: weight of the KL to the reference
    lr: float = 3e-4


@dataclass(frozen=True)
class Rollout:
    text: Text
    latents: Tensor  # (N, T+1, C, H, W): before each step, and the last
    logp: Tensor  # (N, T): of each step, under the weights that sampled it
    sigmas: Tensor  # (T+1,)

    def rows(self, index: Tensor) -> Rollout:
        text = self.text[0][index], self.text[1][index]
        return Rollout(text, self.latents[index], self.logp[index], self.sigmas)


@torch.no_grad()
def encode(pipe: Pipeline, prompts: Sequence[str], group: int) -> Text:
    """(N, L, D), (N, D'): each prompt G times in a row. No T5: its sequence length is 0."""
    embeds, _, pooled, _ = pipe.encode_prompt(
        list(prompts), None, None, do_classifier_free_guidance=False, max_sequence_length=0
    )
    return embeds.repeat_interleave(group, 0), pooled.repeat_interleave(group, 0)


def schedule(pipe: Pipeline, steps: int) -> Tensor:
    """(T+1,): the scheduler's own σ, from 1 to 0."""
    pipe.scheduler.set_timesteps(steps)
    return pipe.scheduler.sigmas


def step(transformer: Module, x: Tensor, text: Text, sigmas: Tensor, i: int, a: float) -> Step:
    """The policy π(x'|x) = N(μ, s²|dt|) of step i (Flow-GRPO, eq. 9), a step of the SDE that has
    the marginals of the flow's ODE: μ = x + [v + s²/2σ·(x + (1−σ)v)]·dt,  s = a·√(σ/(1−σ)).
    a = 0 is the ODE. At σ = 1, where s would be infinite, the schedule's second σ replaces it in
    1−σ, as in the authors' code."""
    sigma, dt = sigmas[i], sigmas[i + 1] - sigmas[i]
    v = transformer(x, *text, timestep=(1000 * sigma).expand(len(x))).sample  # (N, C, H, W)
    s = a * torch.sqrt(sigma / (1 - (sigmas[1] if sigma == 1 else sigma)))
    mean = x + (v + s**2 / (2 * sigma) * (x + (1 - sigma) * v)) * dt
    return mean, s * torch.sqrt(-dt), s


def log_prob(x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(N,): log N(x'; μ, std²), averaged and not summed over C,H,W, as in the authors' code."""
    if std == 0:
        return torch.zeros(len(mean))  # the ODE has no density
    return torch.distributions.Normal(mean, std).log_prob(x_next).flatten(1).mean(1)


@torch.no_grad()
def sample(transformer: Module, text: Text, sigmas: Tensor, noise: Tensor, a: float) -> Rollout:
    """Denoise noise[0]; noise[i+1] is the noise of step i. noise: (T+1, N, C, H, W)."""
    latents, logp = [noise[0]], []
    for i in range(len(sigmas) - 1):
        mean, std, _ = step(transformer, latents[-1], text, sigmas, i, a)
        latents.append(mean + std * noise[i + 1])
        logp.append(log_prob(latents[-1], mean, std))
    return Rollout(text, torch.stack(latents, 1), torch.stack(logp, 1), sigmas)


@torch.no_grad()
def decode(pipe: Pipeline, latents: Tensor) -> np.ndarray:
    """(N, C, H, W) → (N, height, width, 3) uint8."""
    z = latents / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
    pixels = (pipe.vae.decode(z).sample / 2 + 0.5).clamp(0, 1)  # (N, 3, height, width)
    return (pixels * 255).round().byte().permute(0, 2, 3, 1).numpy()


def reward(images: np.ndarray) -> Tensor:
    """(N,): contrast, the standard deviation of the grey values in [0, 1]: letters should be large
    and crisp. No gradient flows through it, so it may be any function of the images."""
    return torch.from_numpy((images / 255).mean(3).std((1, 2)))


def advantages(rewards: Tensor) -> Tensor:
    """Flow-GRPO's advantages, (P, G) → (P, G): (r − mean of its group) / (std + 1e-4), clamped to
    ±5. The std is that of the whole batch, as in the authors' code."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred / (rewards.std(correction=0) + 1e-4)).clamp(-5, 5)


def surrogate(logp: Tensor, old_logp: Tensor, adv: Tensor, clip: float) -> Tensor:
    """The clipped loss of PPO (arXiv 1707.06347), (N,): max(−A·r, −A·clip(r, 1−ε, 1+ε)) with the
    ratio r = π(x'|x) / π_old(x'|x)."""
    ratio = torch.exp(logp - old_logp)
    return torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - clip, 1 + clip))


def kl(mean: Tensor, mean_ref: Tensor, s: Tensor) -> Tensor:
    """Flow-GRPO's KL, (N,): (μ − μ_ref)² / 2s², mean over C,H,W, without |dt| as in their code."""
    return ((mean - mean_ref) ** 2 / (2 * s**2)).flatten(1).mean(1)


def update(
    policy: Module, reference: Module, optimizer: AdamW, batch: Rollout, adv: Tensor, config: Config
) -> None:
    """One optimizer step on the mean loss over samples and trained steps. The last step is not
    trained: its std is tiny, and its log-prob extreme. adv: (N,)."""
    optimizer.zero_grad()
    trained = len(batch.sigmas) - 2
    for i in range(trained):
        x, x_next = batch.latents[:, i], batch.latents[:, i + 1]
        mean, std, s = step(policy, x, batch.text, batch.sigmas, i, config.noise)
        loss = surrogate(log_prob(x_next, mean, std), batch.logp[:, i], adv, config.clip)
        if config.beta > 0:
            mean_ref, _, _ = step(reference, x, batch.text, batch.sigmas, i, config.noise)
            loss = loss + config.beta * kl(mean, mean_ref, s)
        (loss.sum() / (len(adv) * trained)).backward()  # gradients add up over the steps
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Config in this file explains the options.")
    for field in fields(Config):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    config = Config(**vars(parser.parse_args(arguments)))

    pipe = Pipeline.from_pretrained(config.model, text_encoder_3=None, tokenizer_3=None)
    policy, reference = pipe.transformer, copy.deepcopy(pipe.transformer).requires_grad_(False)
    optimizer = AdamW(policy.parameters(), lr=config.lr, weight_decay=0.0)
    sigmas, n = schedule(pipe, config.steps), config.groups * config.group
    height, width = config.height // pipe.vae_scale_factor, config.width // pipe.vae_scale_factor
    shape = (policy.config.in_channels, height, width)  # (C, H, W)
    prompts = Path(config.prompts).read_text().splitlines()
    held_out, prompts = encode(pipe, prompts[:8], 1), prompts[8:]
    generator = torch.Generator().manual_seed(config.seed)
    fixed = torch.randn(config.steps + 1, 8, *shape, generator=generator)
    before = after = decode(pipe, sample(policy, held_out, sigmas, fixed, 0.0).latents[:, -1])
    print(f"held-out reward before training: {reward(before).mean():.3f}")
    for k in range(config.iterations):
        chosen = torch.randperm(len(prompts), generator=generator)[: config.groups]  # (P,)
        text = encode(pipe, [prompts[p] for p in chosen], config.group)
        noise = torch.randn(config.steps + 1, n, *shape, generator=generator)
        rollout = sample(policy, text, sigmas, noise, config.noise)
        rewards = reward(decode(pipe, rollout.latents[:, -1]))  # (N,)
        adv = advantages(rewards.view(config.groups, config.group)).flatten().float()  # (N,)
        for rows in torch.randperm(n, generator=generator).chunk(config.updates):
            update(policy, reference, optimizer, rollout.rows(rows), adv[rows], config)
        after = decode(pipe, sample(policy, held_out, sigmas, fixed, 0.0).latents[:, -1])
        print(f"iteration {k:2d}: reward {rewards.mean():.3f}, held-out {reward(after).mean():.3f}")
    Image.fromarray(np.concatenate(np.concatenate([before, after], 2))).save(config.out)


if __name__ == "__main__":
    main()

"""The plain side of flow_iteration.py and model_iteration.py: one iteration as Flow-GRPO's scripts
run it.

The network runs in the precision of its weights, under autocast, with PEFT adapters and without
compilation: both guidance branches in one batch, one denoising step of a batch per pass. Step and
loss formulas are Gesso's, so that both sides compute the same; this file decides how the networks
run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gesso.algorithms.diffusion_nft import DiffusionNFT
from gesso.algorithms.flow_grpo import FlowGRPO
from gesso.formulas import flow_steps, kl, matching, nft, objectives
from gesso.models.flow.packing import pack, unpack
from gesso.traces.flow import Conditioning
from gesso.types import SampleSpec

Noise = Callable[[], Tensor]
Guide = Callable[[Tensor, Tensor, float, Tensor], Tensor]


@dataclass(frozen=True)
class Form:
    """How diffusers' pipelines run a kind of network and of decoder."""

    velocity: Callable[[Any, Tensor, Tensor, Conditioning], Tensor]  # network, x, sigma, cond
    decode: Callable[[Any, Tensor], Tensor]  # decoder, latents


def _sd3(network: Any, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
    return network(
        hidden_states=x,
        timestep=sigma * 1000,
        encoder_hidden_states=cond.embeds,
        pooled_projections=cond.pooled,
        return_dict=False,
    )[0]


def _flux(network: Any, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
    from diffusers import FluxPipeline

    h, w = x.shape[-2:]
    ids = FluxPipeline._prepare_latent_image_ids(1, h // 2, w // 2, x.device, x.dtype)
    v = network(
        hidden_states=pack(x),
        timestep=sigma,
        guidance=cond.guidance,
        pooled_projections=cond.pooled,
        encoder_hidden_states=cond.embeds,
        txt_ids=ids.new_zeros(cond.embeds.shape[1], 3),
        img_ids=ids,
        return_dict=False,
    )[0]
    return unpack(v, h, w)


def _qwen(network: Any, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
    """Without a mask: no prompt is padded."""
    h, w = x.shape[-2:]
    v = network(
        hidden_states=pack(x),
        timestep=sigma,
        encoder_hidden_states=cond.embeds,
        img_shapes=[[(1, h // 2, w // 2)]] * len(x),
        return_dict=False,
    )[0]
    return unpack(v, h, w)


def _decode(vae: Any, z: Tensor) -> Tensor:
    z = z / vae.config.scaling_factor + (vae.config.shift_factor or 0)
    return vae.decode(z, return_dict=False)[0]


def _decode_qwen(vae: Any, z: Tensor) -> Tensor:
    mean, std = (
        z.new_tensor(values).view(-1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return vae.decode((z * std + mean).unsqueeze(2), return_dict=False)[0][:, :, 0]


SD3, FLUX, QWEN = Form(_sd3, _decode), Form(_flux, _decode), Form(_qwen, _decode_qwen)


@dataclass
class Batch:
    """Latents and log-probs of all steps, for some samples."""

    cond: Conditioning
    negative: Conditioning | None
    latents: list[Tensor]  # steps+1 of (N, C, H, W)
    logp: dict[int, Tensor]  # of the stochastic steps, (N,)
    images: Tensor


class Plain:
    def __init__(
        self,
        network: Any,
        vae: Any,
        form: Form,
        guide: Guide,
        lora: Any,
        start: Mapping[str, Tensor],
    ) -> None:
        """`guide`: (negative, positive, scale, sigma) → velocity; `lora`: PEFT's settings; `start`:
        the adapter's weights by Gesso's names."""
        from peft import get_peft_model

        self.device: torch.device = network.device
        self.dtype: torch.dtype | None = torch.bfloat16  # None: float32, the reference
        self.vae, self.form, self.guide = vae, form, guide
        self.network = get_peft_model(network.requires_grad_(False), lora)
        self.network.add_adapter("old", lora)
        self.network.set_adapter("default")
        self.start = start
        self.reset()
        self.trained = [p for p in self.network.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=3e-4, weight_decay=1e-4)

    def reset(self) -> None:
        parameters = dict(self.network.named_parameters())
        with torch.no_grad():
            for name, tensor in self.start.items():
                for adapter in ("default", "old"):
                    full = f"base_model.model.{name}".replace(".default.", f".{adapter}.")
                    parameters[full].copy_(tensor)

    def precision(self) -> AbstractContextManager:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        dtype = self.network.dtype
        cond = replace(
            cond,
            embeds=cond.embeds.to(dtype),
            pooled=None if cond.pooled is None else cond.pooled.to(dtype),
        )
        with self.precision():
            return self.form.velocity(self.network, x.to(dtype), sigma, cond).float()

    def guided(self, x: Tensor, sigma: Tensor, batch: Batch, scale: float, detach: bool) -> Tensor:
        if batch.negative is None or scale <= 1:
            return self.velocity(x, sigma, batch.cond)
        both = Conditioning.stack([batch.negative, batch.cond])
        u, c = self.velocity(x.repeat(2, 1, 1, 1), sigma.repeat(2), both).chunk(2)
        return self.guide(u.detach() if detach else u, c, scale, sigma)

    @torch.no_grad()
    def sample(
        self,
        cond: Conditioning,
        negative: Conditioning | None,
        spec: SampleSpec,
        sigmas: Tensor,
        noise: Noise,
    ) -> Batch:
        """One batch of latents."""
        x = noise()
        batch = Batch(cond, negative, [x], {}, torch.empty(0))
        if spec.weights == "old":
            self.network.set_adapter("old")
        before = None
        for i in range(spec.steps):
            sigma, sigma_next = sigmas[i : i + 2, None].expand(2, len(x))
            v = self.guided(x, sigma, batch, spec.guidance, detach=False)
            if i in spec.stochastic:
                step = flow_steps.transition(
                    spec.rule, x, v, sigma, sigma_next, sigmas[1], spec.noise
                )
                x = step.draw(noise())
                batch.logp[i] = step.logp(x)
            elif spec.solver == "dpm2":
                x, before = flow_steps.dpm2(x, v, sigma, sigma_next, before)
            else:
                x = flow_steps.euler(x, v, sigma, sigma_next)
            batch.latents.append(x)
        self._train_default()
        return batch

    @torch.no_grad()
    def decode(self, batch: Batch) -> None:
        z = batch.latents[-1].to(self.vae.dtype)
        unit = (self.form.decode(self.vae, z).float() / 2 + 0.5).clamp(0, 1)
        batch.images = (unit * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()

    def update(
        self,
        batches: Sequence[Batch],
        advantages: Sequence[Tensor],
        algorithm: Any,
        spec: SampleSpec,
        sigmas: Tensor,
    ) -> None:
        """One optimizer step over all denoising steps of all batches."""
        if isinstance(algorithm, DiffusionNFT):
            self._nft(batches, advantages, algorithm, sigmas)
        else:
            for batch, advantage in zip(batches, advantages, strict=True):
                for i in spec.trained:
                    loss = self.step_loss(batch, advantage, algorithm, i, sigmas)
                    (loss.mean() / (len(batches) * len(spec.trained))).backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step_loss(
        self, batch: Batch, advantage: Tensor, algorithm: FlowGRPO, i: int, sigmas: Tensor
    ) -> Tensor:
        """(N,): the loss of step i of every sample."""
        step = self._transition(batch, algorithm, i, sigmas)
        logp = step.logp(batch.latents[i + 1])
        clip = algorithm.clip
        loss = objectives.clipped(logp, batch.logp[i], advantage, clip, clip).loss
        if algorithm.beta > 0:
            with torch.no_grad(), self.network.disable_adapter():
                reference = self._transition(batch, algorithm, i, sigmas)
            loss = loss + algorithm.beta * kl.gaussian_step(step.mean, reference.mean, step.s)
        return loss

    def _transition(
        self, batch: Batch, algorithm: FlowGRPO, i: int, sigmas: Tensor
    ) -> flow_steps.Transition:
        x = batch.latents[i]
        sigma, sigma_next = sigmas[i : i + 2, None].expand(2, len(x))
        detach = algorithm.guidance_gradient == "conditional"
        v = self.guided(x, sigma, batch, algorithm.guidance, detach)
        return flow_steps.transition(
            algorithm.rule, x, v, sigma, sigma_next, sigmas[1], algorithm.noise
        )

    def _nft(
        self,
        batches: Sequence[Batch],
        advantages: Sequence[Tensor],
        algorithm: DiffusionNFT,
        sigmas: Tensor,
    ) -> None:
        for batch, advantage in zip(batches, advantages, strict=True):
            clean, optimal = batch.latents[-1], nft.optimality(advantage)
            for i in range(algorithm.times):
                t = sigmas[i].expand(len(clean))
                x_t = matching.noised(clean, torch.randn_like(clean), t)
                with torch.no_grad():
                    self.network.set_adapter("old")
                    v_old = self.velocity(x_t, t, batch.cond)
                    self._train_default()
                    with self.network.disable_adapter():
                        v_ref = self.velocity(x_t, t, batch.cond)
                v = self.velocity(x_t, t, batch.cond)
                loss = nft.contrast(v, v_old, clean, x_t, t, optimal, algorithm.beta)
                loss = loss + algorithm.kl * (v - v_ref).square().flatten(1).mean(1)
                (loss.mean() / (len(batches) * algorithm.times)).backward()

    def _train_default(self) -> None:
        self.network.set_adapter("default")

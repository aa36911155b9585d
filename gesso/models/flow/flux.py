"""FLUX.1 dev and schnell."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gesso.models.flow.base import Guidance, TextEncoder
from gesso.models.flow.packing import pack, unpack
from gesso.models.flow.pipeline import JOINT_ATTENTION, PipelineModel
from gesso.models.flow.references import target_and_references
from gesso.models.flow.texts import TextLength, text_encoder
from gesso.quiet import quiet
from gesso.traces.flow import Conditioning
from gesso.types import Prompt, Size, Which


class Flux(PipelineModel):
    """T5 encodes the text, CLIP gives the pooled embedding. Both models are distilled: in dev the
    guidance scale is an input of the network, schnell has no guidance."""

    pipeline = "FluxPipeline"
    large = ("transformer", "text_encoder_2")
    blocks = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    packed = True
    even_sigmas = True
    # Flow-GRPO's list for FLUX.1 dev (there with rank 64, alpha 128); `attn.to_q`, `to_k` and
    # `to_v` also match in the single-stream blocks.
    lora_targets = (
        *JOINT_ATTENTION,
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )

    @property
    def guidance(self) -> Guidance:
        return "embedded" if self.transformer.config.guidance_embeds else "none"

    @property
    def text_lengths(self) -> TextLength:
        """Lengths for T5, from the model cards; CLIP encodes the first 77 tokens."""
        most = 512 if self.guidance == "embedded" else 256
        return TextLength(default=most, least=1, most=most)

    @property
    def text_encoders(self) -> list[TextEncoder]:
        return [
            text_encoder("T5", self.text_length, self.pipe.tokenizer_2),
            text_encoder("CLIP", self.pipe.tokenizer_max_length, self.pipe.tokenizer),
        ]

    @quiet("diffusers")  # `over_long` reports truncated prompts once
    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        embeds, pooled, _ = self.pipe.encode_prompt(
            prompt=[p.text for p in prompts],
            device=self.device,
            max_sequence_length=self.text_length,
        )
        return Conditioning(embeds, pooled)

    def velocity(
        self, x: Tensor, sigma: Tensor, cond: Conditioning, weights: Which = "current"
    ) -> Tensor:
        rows = len(x)
        x, sigma, cond = self.fill(x, sigma, cond)
        h, w = x.shape[-2:]
        target = pack(x).to(self.dtype)  # (N, HW/4, 4C)
        text_ids = torch.zeros(cond.embeds.shape[1], 3, device=x.device, dtype=cond.embeds.dtype)
        v = self.run(
            weights,
            hidden_states=target_and_references(target, cond),
            timestep=self.timestep(sigma) / 1000,
            guidance=cond.guidance,
            pooled_projections=cond.pooled,
            encoder_hidden_states=cond.embeds,
            txt_ids=text_ids,
            img_ids=torch.cat(
                [
                    self._image_ids(0, h // 2, w // 2, cond),
                    *(self._image_ids(1, *size, cond) for size in cond.layout),
                ]
            ),
        )
        return unpack(v[:rows, : target.shape[1]], h, w).float()

    def _image_ids(self, first: int, height: int, width: int, cond: Conditioning) -> Tensor:
        """(height·width, 3): first, row and column of every token."""
        device, dtype = cond.embeds.device, cond.embeds.dtype
        ids = self.pipe._prepare_latent_image_ids(1, height, width, device, dtype)
        ids[:, 0] = first
        return ids

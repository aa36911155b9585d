"""SANA and SANA 1.5."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from gesso.models.flow.base import TextEncoder
from gesso.models.flow.multistep import MultistepModel
from gesso.models.flow.texts import TextLength
from gesso.quiet import quiet
from gesso.traces.flow import Conditioning
from gesso.types import Prompt, Size, Which

PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")


class Sana(MultistepModel):
    """Gemma 2 encodes the text behind an instruction, the negative prompt without it; both are
    padded to one length, behind a mask. The autoencoder (DC-AE) has cells of 32×32 pixels and no
    posterior. Self-attention is linear."""

    pipeline = "SanaPipeline"
    large = ("transformer", "text_encoder")
    blocks = ("SanaTransformerBlock",)
    patch = 1
    cross_attention = True
    lora_targets = tuple(f"{layer}.{name}" for layer in ("attn1", "attn2") for name in PROJECTIONS)

    @property
    def text_width(self) -> int:
        return self.transformer.config.caption_channels

    @property
    def text_lengths(self) -> TextLength:
        return TextLength(default=300, least=2, most=300)

    @cached_property
    def instruction(self) -> list[str]:
        """The default of the pipeline's call."""
        return inspect.signature(self.pipe.__call__).parameters["complex_human_instruction"].default

    @property
    def text_encoders(self) -> list[TextEncoder]:
        """The pipeline keeps the first token and the last, without those of the instruction."""
        tokenizer, before = self.pipe.tokenizer, "\n".join(self.instruction)
        own = len(tokenizer.encode(before)) - 2

        def tokens(text: str) -> int:
            text = text.lower().strip()  # as the pipeline
            return len(tokenizer(before + text, truncation=False, verbose=False).input_ids) - own

        return [TextEncoder("Gemma 2", self.text_length, tokens)]

    @quiet("diffusers")
    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        return Conditioning.stack([self._encode(prompt) for prompt in prompts])

    def _encode(self, prompt: Prompt) -> Conditioning:
        embeds, mask, _, _ = self.pipe.encode_prompt(
            prompt=[prompt.text],
            do_classifier_free_guidance=False,
            device=self.device,
            max_sequence_length=self.text_length,
            complex_human_instruction=None if prompt.is_negative else self.instruction,
        )
        return Conditioning(embeds.to(self.dtype), mask=mask.bool())

    def velocity(
        self, x: Tensor, sigma: Tensor, cond: Conditioning, weights: Which = "current"
    ) -> Tensor:
        rows = len(x)
        x, sigma, cond = self.fill(x, sigma, cond)
        v = self.run(
            weights,
            hidden_states=x.to(self.dtype),
            timestep=self.timestep(sigma) * self.transformer.config.timestep_scale,
            encoder_hidden_states=cond.embeds,
            encoder_attention_mask=cond.mask,
        )
        return v[:rows].float()

    def blank_texts(self, rows: int) -> Conditioning:
        cond = super().blank_texts(rows)
        mask = torch.ones(rows, self.text_length, dtype=torch.bool, device=self.device)
        return Conditioning(cond.embeds, mask=mask)

    def pixels(self, latents: Tensor) -> Tensor:
        vae = self.pipe.vae
        z = latents / vae.config.scaling_factor
        return vae.decode(z.to(vae.dtype), return_dict=False)[0]

    def latents(self, pixels: Tensor) -> Tensor:
        vae = self.pipe.vae
        return vae.encode(pixels).latent.float() * vae.config.scaling_factor

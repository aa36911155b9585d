"""Stable Diffusion 3 and 3.5 (medium and large)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gesso.models.flow.base import TextEncoder
from gesso.models.flow.pipeline import JOINT_ATTENTION, PipelineModel
from gesso.models.flow.texts import TextLength, text_encoder
from gesso.quiet import quiet
from gesso.traces.flow import Conditioning
from gesso.types import Prompt, Size, Which


class SD3(PipelineModel):
    """Two CLIP text encoders and T5; guidance by a negative prompt."""

    pipeline = "StableDiffusion3Pipeline"
    large = ("transformer", "text_encoder_3")
    blocks = ("JointTransformerBlock",)
    lora_targets = JOINT_ATTENTION  # as in Flow-GRPO: 18,776,064 parameters, rank 32, SD3.5-M

    @property
    def text_lengths(self) -> TextLength:
        """Lengths for T5, by default 128 as in Flow-GRPO; CLIP encodes 77 tokens. Without T5 its
        embeddings are zeros of that length, which may be 0."""
        return TextLength(default=128, least=0 if self.pipe.tokenizer_3 is None else 1, most=512)

    @property
    def text_tokens(self) -> int:
        return self.pipe.tokenizer_max_length + self.text_length

    @property
    def text_encoders(self) -> list[TextEncoder]:
        clip = text_encoder("CLIP", self.pipe.tokenizer_max_length, self.pipe.tokenizer)
        if self.pipe.tokenizer_3 is None:
            return [clip]
        return [text_encoder("T5", self.text_length, self.pipe.tokenizer_3), clip]

    @quiet("diffusers")  # `over_long` reports truncated prompts once
    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            prompt=[p.text for p in prompts],
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            device=self.device,
            max_sequence_length=self.text_length,
        )
        return Conditioning(embeds, pooled)

    def velocity(
        self, x: Tensor, sigma: Tensor, cond: Conditioning, weights: Which = "current"
    ) -> Tensor:
        rows = len(x)
        x, sigma, cond = self.fill(x, sigma, cond)
        v = self.run(
            weights,
            hidden_states=x.to(self.dtype),
            timestep=sigma * self.pipe.scheduler.config.num_train_timesteps,
            encoder_hidden_states=cond.embeds,
            pooled_projections=cond.pooled,
        )
        return v[:rows].float()

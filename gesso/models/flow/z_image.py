"""Z-Image and Z-Image-Turbo."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from gesso.models.flow.base import TextEncoder
from gesso.models.flow.pipeline import PipelineModel
from gesso.models.flow.rotation import rotate
from gesso.models.flow.texts import TextLength, chat_encoder
from gesso.quiet import quiet
from gesso.traces.flow import Conditioning
from gesso.types import Prompt, Size, Which

MULTIPLE = 32  # the network pads texts and images to multiples of it, by learned tokens


class ZImage(PipelineModel):
    """Qwen3 encodes the text; prompts have different lengths. The network gets the time as 1 − σ
    and predicts −v. Guidance uses a negative prompt; scale s of the pipeline is c + s·(c − u), here
    s + 1. Turbo is distilled: it is trained and used with a scale of 1 here."""

    pipeline = "ZImagePipeline"
    large = ("transformer", "text_encoder")
    blocks = ("ZImageTransformerBlock",)
    even_sigmas = True
    scale_offset = 1.0
    # Flow-Factory's list (there with rank 64, alpha 128).
    lora_targets = (
        *(f"attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"feed_forward.{name}" for name in ("w1", "w2", "w3")),
    )

    @property
    def head_size(self) -> int:
        return self.transformer.config.dim // self.transformer.config.n_heads

    @property
    def text_width(self) -> int:
        return self.transformer.config.cap_feat_dim

    @property
    def text_lengths(self) -> TextLength:
        return TextLength(default=512, least=1, most=512)

    @property
    def text_encoders(self) -> list[TextEncoder]:
        return [chat_encoder("Qwen3", self.text_length, self.pipe.tokenizer, enable_thinking=True)]

    @quiet("diffusers")
    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        embeds, _ = self.pipe.encode_prompt(
            prompt=[p.text for p in prompts],  # the pipeline writes into it
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.text_length,
        )
        masks = [torch.ones(1, len(row), dtype=torch.bool, device=self.device) for row in embeds]
        rows = zip(embeds, masks, strict=True)
        return Conditioning.stack([Conditioning(row[None], mask=mask) for row, mask in rows])

    def velocity(
        self, x: Tensor, sigma: Tensor, cond: Conditioning, weights: Which = "current"
    ) -> Tensor:
        rows = len(x)
        x, sigma, cond = self.fill(x, sigma, cond)
        texts = list(cond.embeds)
        if cond.mask is not None:
            texts = [row[:n] for row, n in zip(texts, cond.mask.sum(1).tolist(), strict=True)]
        v = self.run(
            weights,
            x=list(x.to(self.dtype).unsqueeze(2)),
            t=1 - sigma,
            cap_feats=texts,
        )  # (N, C, 1, H, W)
        return -v[:rows].squeeze(2).float()

    def before_compiling(self) -> None:
        """Every sequence is padded to the length of the longest prompt, behind a mask, so that
        blocks have fixed shapes; rotations are pairs of real numbers, since inductor has no kernels
        for complex ones."""
        network = self.transformer
        length = self.text_length + -self.text_length % MULTIPLE
        network._prepare_sequence = partial(_prepare, network._prepare_sequence, network, length)
        network._build_unified_sequence = partial(_join, network._build_unified_sequence, length)
        for module in network.modules():
            if type(module).__name__ in self.blocks:
                module.attention.set_processor(RealRotation())


def _prepare(original: Any, network: Any, length: int, *inputs: Any) -> tuple[Any, ...]:
    """Prepares the images, all of one length, or the texts."""
    x, rotation, mask, lengths, noise = original(*inputs)
    rotation = torch.view_as_real(rotation)
    if inputs[3] is network.cap_pad_token:
        x, rotation, mask = _padded(x, rotation, lengths, length)
    return x, rotation, mask, lengths, noise


def _join(original: Any, length: int, *inputs: Any) -> tuple[Any, ...]:
    """Joins the sequences of images and texts."""
    x, rotation, _, noise = original(*inputs)
    images, texts = inputs[2], inputs[6]
    lengths = [a + b for a, b in zip(images, texts, strict=True)]
    return *_padded(x, rotation, lengths, images[0] + length), noise


def _padded(
    x: Tensor, rotation: Tensor, lengths: Sequence[int], length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """x (n, s, D) and its rotation (n, s, d / 2, 2), padded to one length, with a mask of it."""
    missing = length - x.shape[1]
    positions = torch.arange(length, device=x.device)
    mask = positions < torch.tensor(lengths, device=x.device)[:, None]
    return pad(x, (0, 0, 0, missing)), pad(rotation, (0, 0, 0, 0, 0, missing)), mask


class RealRotation:
    """The network's attention, with rotations as pairs of real numbers."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: None = None,
        attention_mask: Tensor | None = None,
        freqs_cis: Tensor | None = None,
    ) -> Tensor:
        assert freqs_cis is not None
        projections = attn.to_q, attn.to_k, attn.to_v
        q, k, v = (p(hidden_states).unflatten(-1, (attn.heads, -1)) for p in projections)
        q, k = rotate(attn.norm_q(q), freqs_cis), rotate(attn.norm_k(k), freqs_cis)
        mask = None if attention_mask is None else attention_mask[:, None, None]
        out = scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
        )
        return attn.to_out[0](out.transpose(1, 2).flatten(2))

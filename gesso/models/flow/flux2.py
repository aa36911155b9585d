"""FLUX.2 dev, and FLUX.2 klein (base and distilled)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from PIL.Image import Image
from torch import Tensor

from gesso.models.flow.base import Guidance, TextEncoder
from gesso.models.flow.editing import EditingModel
from gesso.models.flow.pipeline import JOINT_ATTENTION
from gesso.models.flow.references import target_and_references, with_references, wrong_ratio
from gesso.models.flow.texts import TextLength, chat_encoder
from gesso.quiet import quiet
from gesso.traces.flow import Conditioning
from gesso.types import Prompt, Size, UserError, Which

MIN_SIDE, MAX_RATIO = 64, 8  # of input images, in the pipeline's check_image_input


class Flux2(EditingModel):
    """Three hidden layers of Mistral encode the text, after a system message, padded to one length
    without a mask. Latents are the autoencoder's in patches of 2×2 cells, normalised by the
    statistics of its batch norm. Tokens of input images follow those of the image. The guidance
    scale is an input of the network."""

    pipeline = "Flux2Pipeline"
    large = ("transformer", "text_encoder")
    blocks = ("Flux2TransformerBlock", "Flux2SingleTransformerBlock")
    patch = 1
    input_images = range(11)  # the pipeline takes any number; 10 by the model's authors
    even_sigmas = True
    # Flow-Factory's list (there with rank 64, alpha 128). A single-stream block has one projection
    # for queries, keys, values and MLP; its `attn.to_out` is a layer, that of the others a list.
    lora_targets = (
        *JOINT_ATTENTION,
        "ff.linear_in",
        "ff.linear_out",
        "ff_context.linear_in",
        "ff_context.linear_out",
        "attn.to_qkv_mlp_proj",
    )

    @property
    def guidance(self) -> Guidance:
        return "embedded" if self.transformer.config.guidance_embeds else "none"

    @property
    def text_lengths(self) -> TextLength:
        most = self.pipe.tokenizer_max_length
        return TextLength(default=most, least=1, most=most)

    @property
    def text_encoders(self) -> list[TextEncoder]:
        """The count includes the system message and the chat template."""
        return [TextEncoder("Mistral", self.text_length, self._tokens)]

    def _tokens(self, text: str) -> int:
        from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        messages = format_input([text], self.pipe.system_message)
        tokens = self.pipe.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
        return len(tokens["input_ids"][0])

    @property
    def cell(self) -> int:
        return 2 * self.pipe.vae_scale_factor

    def shift(self, tokens: int, steps: int) -> float:
        """The pipeline's own fit to tokens and steps, not that of the scheduler's config."""
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        return compute_empirical_mu(tokens, steps)

    @quiet("diffusers")
    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        embeds, _ = self.pipe.encode_prompt(
            prompt=[p.text for p in prompts],
            device=self.device,
            max_sequence_length=self.text_length,
        )
        return with_references(self, Conditioning(embeds), prompts)

    def tokens(self, latents: Tensor) -> Tensor:
        return latents.flatten(2).mT

    def wrong_size(self, height: int, width: int) -> str | None:
        if min(height, width) < MIN_SIDE:
            return f"sides of at least {MIN_SIDE} pixels"
        return wrong_ratio(height, width, MAX_RATIO)

    def reference_size(self, height: int, width: int) -> tuple[int, int]:
        """At most as large as an output image, cropped to whole cells."""
        scale = min(1.0, math.sqrt(self.area / (height * width)))
        tall, wide = (int(side * scale) // self.cell * self.cell for side in (height, width))
        return tall, wide

    def reference(self, image: Image) -> Tensor:
        """For outputs of 1024² the pixels of the pipeline."""
        processor = self.pipe.image_processor
        try:
            processor.check_image_input(image)
        except ValueError as error:
            raise UserError(f"input image: {error}") from error
        size = self.reference_size(image.height, image.width)
        image = processor._resize_if_exceeds_area(image, self.area)
        return processor.preprocess(image, *size, resize_mode="crop")

    def velocity(
        self, x: Tensor, sigma: Tensor, cond: Conditioning, weights: Which = "current"
    ) -> Tensor:
        rows = len(x)
        x, sigma, cond = self.fill(x, sigma, cond)
        ids = self.pipe._prepare_latent_ids(x[:1])
        if cond.layout:
            references = [torch.empty(1, 1, *size) for size in cond.layout]
            ids = torch.cat([ids, self.pipe._prepare_image_ids(references)], 1)
        v = self.run(
            weights,
            hidden_states=target_and_references(self.tokens(x).to(self.dtype), cond),
            timestep=self.timestep(sigma) / 1000,
            guidance=cond.guidance,
            encoder_hidden_states=cond.embeds,
            txt_ids=self.pipe._prepare_text_ids(cond.embeds[:1]).to(x.device),
            img_ids=ids.to(x.device),
        )
        return v[:rows, : x[0, 0].numel()].mT.unflatten(2, x.shape[2:]).float()

    def pixels(self, latents: Tensor) -> Tensor:
        vae = self.pipe.vae
        mean, std = self._statistics()
        z = self.pipe._unpatchify_latents(latents * std + mean)
        return vae.decode(z.to(vae.dtype), return_dict=False)[0]

    def latents(self, pixels: Tensor) -> Tensor:
        z = self.pipe.vae.encode(pixels).latent_dist.mode().float()
        mean, std = self._statistics()
        return (self.pipe._patchify_latents(z) - mean) / std

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and std of the latents, per channel."""
        norm, epsilon = self.pipe.vae.bn, self.pipe.vae.config.batch_norm_eps
        mean, variance = (t.float().view(-1, 1, 1) for t in (norm.running_mean, norm.running_var))
        return mean, (variance + epsilon).sqrt()


class Flux2Klein(Flux2):
    """Qwen3 encodes the text. The base models have guidance by a second pass, which in the pipeline
    is over an empty prompt; the distilled ones have none."""

    pipeline = "Flux2KleinPipeline"

    @property
    def guidance(self) -> Guidance:
        return "none" if self.pipe.config.is_distilled else "negative"

    @property
    def text_encoders(self) -> list[TextEncoder]:
        return [chat_encoder("Qwen3", self.text_length, self.pipe.tokenizer, enable_thinking=False)]

"""Builds the bundled image model with random weights: a very small Stable Diffusion 3 pipeline.

Sized for two CPU cores: 48 image tokens, 15 text tokens and a decoder that takes about 4 ms per
image.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gesso.zoo.words import COLOURS, LENGTHS, TEMPLATE_WORDS

LATENT_CHANNELS = 8
WIDTH = 128
TEXT_WIDTHS = (112, 16)  # concatenated to the transformer's text width
POOLED_WIDTHS = (48, 16)
START, END = "<|startoftext|>", "<|endoftext|>"


def build_pipeline() -> Any:
    """StableDiffusion3Pipeline with random weights from torch's global generator."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    tokenizer = build_tokenizer()
    return StableDiffusion3Pipeline(
        transformer=_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(),
        text_encoder=_text_encoder(tokenizer, TEXT_WIDTHS[0], POOLED_WIDTHS[0], heads=4),
        tokenizer=tokenizer,
        text_encoder_2=_text_encoder(tokenizer, TEXT_WIDTHS[1], POOLED_WIDTHS[1], heads=1),
        tokenizer_2=build_tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )


def build_tokenizer(
    words: Sequence[str] = (*TEMPLATE_WORDS, *COLOURS),
    tokens: int = 2 + len(TEMPLATE_WORDS) + 1 + 2 + max(LENGTHS),
) -> Any:
    """A character-level CLIP tokenizer: one token per letter, and one per word of the template.

    The template's words are added tokens that match only whole words. As merges they would also
    match letters inside the quoted words ("that" in "thatch").
    """
    from transformers import AddedToken, CLIPTokenizer

    characters = 'abcdefghijklmnopqrstuvwxyz"'
    whole_words = [word for word in words if len(word) > 1]
    pieces = [*characters, *(f"{c}</w>" for c in characters), START, END]
    tokenizer = CLIPTokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[],
        bos_token=START,
        eos_token=END,
        pad_token=END,
        unk_token=END,
        model_max_length=tokens,
    )
    tokenizer.add_tokens([AddedToken(word, single_word=True) for word in whole_words])
    return tokenizer


def _text_encoder(tokenizer: Any, width: int, pooled_width: int, heads: int) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=4 * width,
            projection_dim=pooled_width,
            num_hidden_layers=2,
            num_attention_heads=heads,
            max_position_embeddings=tokenizer.model_max_length,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _transformer() -> Any:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=24,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=6,
        attention_head_dim=32,
        num_attention_heads=WIDTH // 32,
        joint_attention_dim=sum(TEXT_WIDTHS),
        caption_projection_dim=WIDTH,
        pooled_projection_dim=sum(POOLED_WIDTHS),
        pos_embed_max_size=12,
    )


def _vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(16, 32, 48),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        norm_num_groups=8,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def save_pipeline(pipe: Any, folder: Path) -> None:
    """Saves transformer and VAE in float16, which diffusers loads as float32.

    The text encoders stay float32: transformers loads them in the saved dtype.
    """
    import copy

    pipe.save_pretrained(folder)
    for name in ("transformer", "vae"):
        copy.deepcopy(getattr(pipe, name)).half().save_pretrained(folder / name)


def load_pipeline(folder: Path) -> Any:
    """diffusers requires explicit Nones for the T5, although the folder does not list one."""
    from diffusers import StableDiffusion3Pipeline

    return StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)

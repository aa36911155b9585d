"""Builds the bundled editing model with random weights: a very small FLUX.1 Kontext pipeline.

The autoencoder is that of the bundled image model. 48 tokens of the result, 48 of the source and 12
of the text.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gesso.config import PACKAGE
from gesso.zoo.edits import LENGTH, TEMPLATE_WORDS
from gesso.zoo.words import ALPHABET, COLOURS
from tools.zoo.build import LATENT_CHANNELS, build_tokenizer

HEADS, HEAD_WIDTH = 4, 32
TEXT_WIDTH, POOLED_WIDTH = 64, 16
TEXT_TOKENS = 4 + 1 + 1 + LENGTH + 1 + 1  # four words, a space, quotes, the end; CLIP has a start
SIGNS = PACKAGE / "zoo" / "signs"
WHOLE_WORDS = [word for word in (*TEMPLATE_WORDS, *COLOURS) if len(word) > 1]
CHARACTERS = [*ALPHABET, '"', "a"]


def build_pipeline() -> Any:
    """FluxKontextPipeline with random weights from torch's global generator."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxKontextPipeline

    tokenizer = build_tokenizer(WHOLE_WORDS, TEXT_TOKENS)
    vae = AutoencoderKL.from_pretrained(SIGNS / "vae")
    vae.register_to_config(_name_or_path="gesso/zoo/signs/vae")  # not the path on this machine
    return FluxKontextPipeline(
        transformer=_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=_clip(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=_t5(),
        tokenizer_2=t5_tokenizer(WHOLE_WORDS, TEXT_TOKENS),
    )


def _transformer() -> Any:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=4 * LATENT_CHANNELS,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=HEAD_WIDTH,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=POOLED_WIDTH,
        axes_dims_rope=(4, 12, 16),
    )


def t5_tokenizer(words: Sequence[str], tokens: int) -> Any:
    """A token for each capital letter and for each of these words of a template."""
    from transformers import AddedToken, T5TokenizerFast

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -9.0)]
    tokenizer = T5TokenizerFast(
        vocab=pieces + [(c, -2.0) for c in CHARACTERS], extra_ids=0, model_max_length=tokens
    )
    tokenizer.add_tokens([AddedToken(word, single_word=True) for word in words])
    return tokenizer


def t5_settings(whole_words: list[str], width: int) -> dict[str, Any]:
    """Of a small T5 or UMT5 for `t5_tokenizer`."""
    return {
        "vocab_size": 4 + len(CHARACTERS) + len(whole_words),
        "d_model": width,
        "d_kv": 32,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 2,
        "dropout_rate": 0.0,
        "feed_forward_proj": "gated-gelu",
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


def _t5() -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(**t5_settings(WHOLE_WORDS, TEXT_WIDTH)))


def _clip(tokenizer: Any) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=POOLED_WIDTH,
            intermediate_size=4 * POOLED_WIDTH,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=tokenizer.model_max_length,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def load_pipeline(folder: Path) -> Any:
    from diffusers import FluxKontextPipeline

    return FluxKontextPipeline.from_pretrained(folder)

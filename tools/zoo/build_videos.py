"""Builds the bundled video model with random weights: a very small Wan 2.1 pipeline.

5 frames of 32 × 96 are latents (8, 2, 8, 24): 96 tokens of the video, 16 of the text.
"""

from pathlib import Path
from typing import Any

from gesso.zoo.videos import LENGTH, TEMPLATE_WORDS
from gesso.zoo.words import COLOURS
from tools.zoo.build_edits import t5_settings, t5_tokenizer

HEADS, HEAD_WIDTH, LAYERS = 4, 32, 5
TEXT_WIDTH = 64
CHANNELS = 8
SHAPE = (CHANNELS, 2, 8, 24)  # of the latents
TEXT_TOKENS = 7 + 2 + 2 + LENGTH + 1  # words, two spaces, quotes, letters, the end
WHOLE_WORDS = [word for word in (*TEMPLATE_WORDS, *COLOURS) if len(word) > 1]


def build_pipeline(vae_width: int = 8) -> Any:
    """WanPipeline with random weights from torch's global generator."""
    from diffusers import UniPCMultistepScheduler, WanPipeline

    return WanPipeline(
        transformer=_transformer(),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0
        ),
        vae=_vae(vae_width),
        text_encoder=_umt5(),
        tokenizer=t5_tokenizer(WHOLE_WORDS, TEXT_TOKENS),
    )


def _transformer() -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_WIDTH,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=128,
        ffn_dim=4 * HEADS * HEAD_WIDTH,
        num_layers=LAYERS,
        rope_max_seq_len=64,
    )


def _vae(width: int) -> Any:
    """4 × smaller in space and in time; its statistics are measured after training."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=width,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
        scale_factor_temporal=4,
        scale_factor_spatial=4,
    )


def _umt5() -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(**t5_settings(WHOLE_WORDS, TEXT_WIDTH)))


def load_pipeline(folder: Path) -> Any:
    from diffusers import WanPipeline

    return WanPipeline.from_pretrained(folder)

"""Builds the bundled video model with random weights: a very small Wan 2.1 pipeline.

5 frames of 32 × 96 are latents (32, 2, 4, 12): 96 tokens of the video, 16 of the text. The VAE is
shaped as that of Wan 2.2 (patches, residual shortcuts), which learns much faster than that of 2.1.
"""

from pathlib import Path
from typing import Any

from torch import nn

from gesso.zoo.videos import LENGTH, TEMPLATE_WORDS
from gesso.zoo.words import COLOURS
from tools.zoo.build_edits import t5_settings, t5_tokenizer

HEADS, HEAD_WIDTH, LAYERS = 4, 32, 5
TEXT_WIDTH = 64
LOGVAR = -6.0  # of the untrained VAE
CHANNELS = 32
SHAPE = (CHANNELS, 2, 4, 12)  # of the latents
TEXT_TOKENS = 7 + 2 + 2 + LENGTH + 1  # words, two spaces, quotes, letters, the end
WHOLE_WORDS = [word for word in (*TEMPLATE_WORDS, *COLOURS) if len(word) > 1]


def build_pipeline(vae_width: int = 16) -> Any:
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
        patch_size=(1, 1, 1),
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
    """8 × smaller in space, 4 × in time; its statistics are measured after training.

    With latents of little noise from the start it learns letters hundreds of steps earlier.
    """
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan(
        base_dim=width,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_temporal=4,
        scale_factor_spatial=8,
    )
    nn.init.constant_(vae.quant_conv.bias.data[CHANNELS:], LOGVAR)
    return vae


def _umt5() -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(**t5_settings(WHOLE_WORDS, TEXT_WIDTH)))


def load_pipeline(folder: Path) -> Any:
    from diffusers import WanPipeline

    return WanPipeline.from_pretrained(folder)

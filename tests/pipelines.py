"""Tiny pipelines of the real classes with random weights, saved to disk: every model that Gesso
knows, small enough for two CPU cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

LETTERS = 'abcdefghijklmnopqrstuvwxyz "'
VAE_SCALE = 2  # pixels a latent cell: pictures are multiples of 4
CHANNELS = 4  # of the latents


def build(name: str, folder: Path, scale: int = 1, **layers: int) -> Path:
    """Save the pipeline of that name to a folder, its transformer and its text encoders `scale`
    times as wide as they must be, its transformer with `num_layers` or `num_single_layers`, if
    given."""
    return write(BUILDERS[name], folder, scale, layers)


def write(
    builder: Callable[[int], Any], folder: Path, scale: int, layers: Mapping[str, int]
) -> Path:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe = builder(scale)
        if layers:
            settings = {**pipe.transformer.config, **layers}
            pipe.register_modules(transformer=type(pipe.transformer).from_config(settings))
        _liven(pipe.transformer)
        if getattr(pipe, "transformer_2", None) is not None:
            _liven(pipe.transformer_2)
    pipe.save_pretrained(folder)
    return folder


def _liven(transformer: Any) -> None:
    """Weights with which picture, text, time and guidance all matter to the velocity, as they do
    in a trained network; fresh ones leave the gates nearly shut."""
    import torch

    for name, parameter in transformer.named_parameters():
        if parameter.ndim == 2:
            gain = 0.5 if name.startswith("proj_out") else 1.0
            torch.nn.init.normal_(parameter, std=gain / math.sqrt(parameter.shape[1]))
        elif "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.2)


def _scheduler(**settings: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**settings)


# Real values, but for the numbers of tokens, which are scaled down so that the shift differs
# between pictures of this size as much as it does between 512² and 1024².
DYNAMIC = {"use_dynamic_shifting": True, "base_image_seq_len": 4, "max_image_seq_len": 64}


def _sd3(scale: int) -> Any:
    return _stable_diffusion(scale, with_t5=False)


def _sd35(scale: int) -> Any:
    """As SD3.5 medium: a second attention in the first layer, normed queries, T5."""
    return _stable_diffusion(scale, with_t5=True, dual_attention_layers=(0,), qk_norm="rms_norm")


def _stable_diffusion(scale: int, with_t5: bool, **variant: Any) -> Any:
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=16, patch_size=2, in_channels=CHANNELS, out_channels=CHANNELS,
            num_layers=3, attention_head_dim=8 * scale, num_attention_heads=2,
            joint_attention_dim=24 * scale, caption_projection_dim=16 * scale,
            pooled_projection_dim=16 * scale, pos_embed_max_size=24, **variant,
        ),
        scheduler=_scheduler(shift=3.0),
        vae=_vae(),
        text_encoder=_clip(scale, projected=True),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_clip(scale, projected=True),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=_t5(scale) if with_t5 else None,
        tokenizer_3=_t5_tokenizer() if with_t5 else None,
    )  # fmt: skip


def _flux_dev(scale: int) -> Any:
    dynamic = DYNAMIC | {"base_shift": 0.5, "max_shift": 1.15, "shift": 3.0}
    return _flux(scale, guidance_embeds=True, scheduler=_scheduler(**dynamic))


def _flux_schnell(scale: int) -> Any:
    return _flux(scale, guidance_embeds=False, scheduler=_scheduler(shift=1.0))


def _flux(scale: int, guidance_embeds: bool, scheduler: Any) -> Any:
    from diffusers import FluxPipeline, FluxTransformer2DModel

    return FluxPipeline(
        transformer=FluxTransformer2DModel(
            in_channels=4 * CHANNELS, num_layers=2, num_single_layers=2,
            attention_head_dim=16 * scale, num_attention_heads=2, joint_attention_dim=24 * scale,
            pooled_projection_dim=8 * scale, guidance_embeds=guidance_embeds,
            axes_dims_rope=(4 * scale, 6 * scale, 6 * scale),
        ),
        scheduler=scheduler,
        vae=_vae(),
        text_encoder=_clip(scale, projected=False),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_t5(scale),
        tokenizer_2=_t5_tokenizer(),
    )  # fmt: skip


def _qwen_image(scale: int) -> Any:
    return _qwen("QwenImagePipeline", scale, _qwen_tokenizer())


def _qwen(pipeline: str, scale: int, tokenizer: Any, **parts: Any) -> Any:
    import diffusers
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel

    dynamic = DYNAMIC | {"base_shift": 0.5, "max_shift": 0.9, "shift_terminal": 0.02}
    return getattr(diffusers, pipeline)(
        transformer=QwenImageTransformer2DModel(
            in_channels=4 * CHANNELS, out_channels=CHANNELS, num_layers=2,
            attention_head_dim=16 * scale, num_attention_heads=2, joint_attention_dim=24 * scale,
            axes_dims_rope=(4 * scale, 6 * scale, 6 * scale),
        ),
        scheduler=_scheduler(**dynamic),
        vae=AutoencoderKLQwenImage(
            base_dim=8, z_dim=CHANNELS, dim_mult=[1, 2], num_res_blocks=1,
            temperal_downsample=[False], latents_mean=[-0.7, 0.1, 0.9, 1.5],
            latents_std=[2.8, 1.4, 2.3, 1.1],
        ),
        text_encoder=_qwen_vl(tokenizer, scale),
        tokenizer=tokenizer,
        **parts,
    )  # fmt: skip


def _flux2(scale: int) -> Any:
    from diffusers import Flux2Pipeline

    tokenizer = _chat_tokenizer(SPOKEN)
    return Flux2Pipeline(
        text_encoder=_mistral(len(tokenizer), scale), tokenizer=tokenizer, **_flux2_parts(scale)
    )


def _klein(scale: int) -> Any:
    return _flux2_klein(scale, is_distilled=False)


def _klein_distilled(scale: int) -> Any:
    return _flux2_klein(scale, is_distilled=True)


def _flux2_klein(scale: int, is_distilled: bool) -> Any:
    from diffusers import Flux2KleinPipeline

    tokenizer = _chat_tokenizer(CHAT)
    return Flux2KleinPipeline(
        text_encoder=_qwen3(len(tokenizer), scale, layers=27), tokenizer=tokenizer,
        is_distilled=is_distilled, **_flux2_parts(scale, guidance_embeds=False),
    )  # fmt: skip


def _flux2_parts(scale: int, guidance_embeds: bool = True) -> dict[str, Any]:
    """The text encoder's three layers are joined: 3 × 8 values a token."""
    from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel

    vae = AutoencoderKLFlux2(latent_channels=CHANNELS, **VAE)
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2.0)
    transformer = Flux2Transformer2DModel(
        in_channels=4 * CHANNELS, num_layers=2, num_single_layers=2,
        attention_head_dim=16 * scale, num_attention_heads=2, joint_attention_dim=24 * scale,
        axes_dims_rope=(4 * scale,) * 4, guidance_embeds=guidance_embeds,
        timestep_guidance_channels=32,
    )  # fmt: skip
    scheduler = _scheduler(use_dynamic_shifting=True, shift=3.0)
    return {"transformer": transformer, "vae": vae, "scheduler": scheduler}


def _z_image(scale: int) -> Any:
    from diffusers import ZImagePipeline, ZImageTransformer2DModel

    tokenizer = _chat_tokenizer(CHAT)
    return ZImagePipeline(
        transformer=ZImageTransformer2DModel(
            in_channels=CHANNELS, dim=32 * scale, n_heads=2, n_kv_heads=2, n_layers=2,
            n_refiner_layers=1, cap_feat_dim=8 * scale, axes_lens=(600, 32, 32),
            axes_dims=(4 * scale, 6 * scale, 6 * scale),
        ),
        scheduler=_scheduler(shift=6.0),
        vae=_vae(),
        text_encoder=_qwen3(len(tokenizer), scale, layers=2),
        tokenizer=tokenizer,
    )  # fmt: skip


def _sana(scale: int) -> Any:
    """Three stages of the autoencoder: 4 pixels a cell."""
    from diffusers import AutoencoderDC, SanaPipeline, SanaTransformer2DModel

    stages = ("ResBlock", "ResBlock", "EfficientViTBlock")
    autoencoder = {
        f"{half}_{name}": value
        for half in ("encoder", "decoder")
        for name, value in {
            "block_types": stages, "block_out_channels": (8, 8, 16),
            "layers_per_block": (1, 1, 1), "qkv_multiscales": ((), (), (5,)),
        }.items()
    }  # fmt: skip
    tokenizer = _chat_tokenizer(CHAT)
    return SanaPipeline(
        transformer=SanaTransformer2DModel(
            in_channels=CHANNELS, out_channels=CHANNELS, num_attention_heads=2,
            attention_head_dim=8 * scale, num_layers=2, num_cross_attention_heads=2,
            cross_attention_head_dim=8 * scale, cross_attention_dim=16 * scale,
            caption_channels=8 * scale,
        ),
        scheduler=_scheduler(shift=3.0),
        vae=AutoencoderDC(
            latent_channels=CHANNELS, attention_head_dim=4, scaling_factor=1.3,
            upsample_block_type="interpolate", downsample_block_type="Conv", **autoencoder,
        ),
        text_encoder=_gemma2(len(tokenizer), scale),
        tokenizer=tokenizer,
    )  # fmt: skip


def _gemma2(vocabulary: int, scale: int) -> Any:
    from transformers import Gemma2Config, Gemma2Model

    return Gemma2Model(Gemma2Config(vocab_size=vocabulary, num_hidden_layers=2, **_decoder(scale)))


WAN_VAE: dict[str, Any] = {
    "base_dim": 8, "z_dim": CHANNELS, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
    "temperal_downsample": [False, True, True], "latents_mean": [-0.7, 0.1, 0.9, 1.5],
    "latents_std": [2.8, 1.4, 2.3, 1.1],
}  # fmt: skip


def _wan(scale: int) -> Any:
    """Wan 2.1, text to video."""
    from diffusers import WanPipeline

    return WanPipeline(transformer=_wan_transformer(scale), **_wan_parts(scale))


def _wan_experts(scale: int) -> Any:
    """Wan 2.2 A14B, text to video."""
    from diffusers import WanPipeline

    return WanPipeline(
        transformer=_wan_transformer(scale), transformer_2=_wan_transformer(scale),
        boundary_ratio=0.875, **_wan_parts(scale),
    )  # fmt: skip


def _wan_ti2v(scale: int) -> Any:
    """Wan 2.2 TI2V 5B, whose folders are text to video."""
    from diffusers import WanPipeline

    vae = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12}
    parts = _wan_parts(scale, shift=5.0, scale_factor_spatial=16, **vae)
    return WanPipeline(transformer=_wan_transformer(scale), expand_timesteps=True, **parts)


def _wan_i2v(scale: int) -> Any:
    """Wan 2.1, image to video: tokens of CLIP and condition channels."""
    from diffusers import WanImageToVideoPipeline
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    tower = CLIPVisionConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        image_size=16, patch_size=8, initializer_range=0.5,
    )  # fmt: skip
    size = {"height": 16, "width": 16}
    transformer = _wan_transformer(
        scale, in_channels=2 * CHANNELS + 4, image_dim=8, added_kv_proj_dim=32 * scale
    )
    return WanImageToVideoPipeline(
        transformer=transformer, image_encoder=CLIPVisionModel(tower),
        image_processor=CLIPImageProcessor(size=size, crop_size=size), **_wan_parts(scale),
    )  # fmt: skip


def _wan_i2v_experts(scale: int) -> Any:
    """Wan 2.2 A14B, image to video: condition channels."""
    from diffusers import WanImageToVideoPipeline

    networks = [_wan_transformer(scale, in_channels=2 * CHANNELS + 4) for _ in range(2)]
    return WanImageToVideoPipeline(
        transformer=networks[0], transformer_2=networks[1], boundary_ratio=0.9, **_wan_parts(scale)
    )


def _wan_transformer(scale: int, **variant: Any) -> Any:
    from diffusers import WanTransformer3DModel

    settings = {"in_channels": CHANNELS, "out_channels": CHANNELS, "num_layers": 2} | variant
    return WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16 * scale, text_dim=24 * scale,
        freq_dim=32 * scale, ffn_dim=32 * scale, rope_max_seq_len=64, **settings,
    )  # fmt: skip


def _wan_parts(scale: int, shift: float = 3.0, **vae: Any) -> dict[str, Any]:
    """All but the transformer."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler
    from transformers import UMT5EncoderModel

    return {
        "vae": AutoencoderKLWan(**(WAN_VAE | vae)),
        "scheduler": UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
        ),
        "text_encoder": _t5(scale, UMT5EncoderModel),
        "tokenizer": _t5_tokenizer(),
    }


BUILDERS: dict[str, Callable[[int], Any]] = {
    "sd3": _sd3,
    "sd35": _sd35,
    "flux-dev": _flux_dev,
    "flux-schnell": _flux_schnell,
    "qwen-image": _qwen_image,
    "flux2-dev": _flux2,
    "flux2-klein": _klein,
    "flux2-klein-distilled": _klein_distilled,
    "z-image": _z_image,
    "sana": _sana,
    "wan": _wan,
    "wan-experts": _wan_experts,
    "wan-ti2v": _wan_ti2v,
    "wan-i2v": _wan_i2v,
    "wan-i2v-experts": _wan_i2v_experts,
}
VAE: dict[str, Any] = {
    "block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    "mid_block_add_attention": False, "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip


def _vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(latent_channels=CHANNELS, scaling_factor=1.3, shift_factor=0.1, **VAE)


def _clip_tokenizer() -> Any:
    """A token a letter."""
    from transformers import CLIPTokenizer

    start, end = "<|startoftext|>", "<|endoftext|>"
    tokens = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), start, end]
    return CLIPTokenizer(
        vocab={token: i for i, token in enumerate(tokens)}, merges=[], bos_token=start,
        eos_token=end, pad_token=end, unk_token=end, model_max_length=16,
    )  # fmt: skip


def _clip(scale: int, projected: bool) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    tokenizer = _clip_tokenizer()
    kind = CLIPTextModelWithProjection if projected else CLIPTextModel
    return kind(
        CLIPTextConfig(
            vocab_size=len(tokenizer), hidden_size=8 * scale, intermediate_size=16 * scale,
            projection_dim=8 * scale, num_hidden_layers=2, num_attention_heads=2,
            initializer_range=0.5,
            max_position_embeddings=tokenizer.model_max_length,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip


def _t5_tokenizer() -> Any:
    """A token a letter, and the end."""
    from transformers import T5TokenizerFast

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0)]
    return T5TokenizerFast(vocab=pieces + [(letter, -2.0) for letter in LETTERS], extra_ids=0)


def _t5(scale: int, kind: Any = None) -> Any:
    from transformers import T5EncoderModel

    kind = kind or T5EncoderModel
    return kind(
        kind.config_class(
            vocab_size=4 + len(LETTERS), d_model=24 * scale, d_kv=8 * scale, d_ff=32 * scale,
            num_layers=2, num_heads=2, feed_forward_proj="gated-gelu", pad_token_id=0,
            eos_token_id=1,
        )
    )  # fmt: skip


def _qwen_tokenizer() -> Any:
    """A token a letter, but the words of the pipeline's template as in the real one, whose head
    of 34 tokens is cut off behind the encoder."""
    words = "the image by detailing color shape size texture quantity text spatial relationships"
    return _with_words(f"{words} of objects and background", ",:", [])


VISION = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")


def _with_words(words: str, marks: str, more: Sequence[str]) -> Any:
    from transformers import AddedToken, Qwen2Tokenizer

    spaced = dict.fromkeys(f" {word}" for word in words.split())
    whole = ["system", "Describe", "user", "assistant", *spaced, *more]
    letters = [*LETTERS.replace(" ", "Ġ"), "Ċ", *marks]
    tokenizer = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(letters)}, merges=[])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in whole])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def image_token_ids(tokenizer: Any) -> dict[str, int]:
    """For a Qwen2.5-VL config: the ids of the tokens around images, if the tokenizer has them."""
    names = ("image_token_id", "vision_start_token_id", "vision_end_token_id", "video_token_id")
    known = tokenizer.get_vocab()
    return {name: known[t] for name, t in zip(names, VISION, strict=True) if t in known}


def _qwen_vl(tokenizer: Any, scale: int) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            **image_token_ids(tokenizer),
            text_config={
                "vocab_size": len(tokenizer), "hidden_size": 24 * scale,
                "intermediate_size": 32 * scale, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 1,
                "max_position_embeddings": 2048, "initializer_range": 0.5,
                "rope_scaling": {"type": "mrope", "mrope_section": [2 * scale] * 3},
            },
            vision_config={
                "depth": 1, "hidden_size": 16 * scale, "intermediate_size": 16 * scale,
                "num_heads": 2, "out_hidden_size": 24 * scale, "fullatt_block_indexes": [0],
            },
        )
    )  # fmt: skip


THINKING = "{% if not enable_thinking %}<think></think>{% endif %}"
CHAT = (
    "{% for m in messages %}<|im_start|>user{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    + THINKING
)  # as Qwen3's, shorter
SPOKEN = "{% for m in messages[1:] %}[INST]{{ m.content[0].text }}[/INST]{% endfor %}"
"""As Mistral's, without the system message, which is longer than the prompts of tests."""


def _chat_tokenizer(template: str) -> Any:
    """A token a letter."""
    from transformers import Qwen2Tokenizer

    letters = [*LETTERS.replace(" ", "Ġ")]
    special = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "[INST]", "[/INST]", "<pad>"]
    tokenizer = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(letters)}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": special, "pad_token": "<pad>"})
    tokenizer.chat_template = template
    return tokenizer


def _qwen3(vocabulary: int, scale: int, layers: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=vocabulary, num_hidden_layers=layers, **_decoder(scale))
    )


def _mistral(vocabulary: int, scale: int) -> Any:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    text = _decoder(scale) | {"vocab_size": vocabulary, "num_hidden_layers": 30}
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4,
        "num_attention_heads": 2, "patch_size": 4, "image_size": 8,
    }  # fmt: skip
    return Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config={"model_type": "mistral", **text},
            vision_config={"model_type": "pixtral", **vision},
        )
    )


def _decoder(scale: int) -> dict[str, Any]:
    return {
        "hidden_size": 8 * scale, "intermediate_size": 16 * scale, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4 * scale, "max_position_embeddings": 1024,
        "initializer_range": 0.5,
    }  # fmt: skip

"""The published sizes of SD3.5-M and -L, FLUX.1-dev and Kontext, FLUX.2, Qwen-Image and -Edit,
Z-Image, Wan, Qwen2.5-VL and Qwen2.5-7B: folders of configs without weights, or with random ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from tests import editors, pipelines
from tests import tokens as writers


def write_configs(name: str, folder: Path) -> Path:
    """What `gesso check --memory` needs of a pipeline, with the tiny tokenizers of pipelines.py."""
    with torch.device("meta"):
        pipe = SIZES[name]()
    pipe.save_config(folder)
    for part_name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module) and hasattr(part, "save_config"):
            part.save_config(folder / part_name)
        elif isinstance(part, torch.nn.Module):
            part.config.save_pretrained(folder / part_name)
        elif part is not None:
            part.save_pretrained(folder / part_name)
    return _completed(name, folder)


def _completed(name: str, folder: Path) -> Path:
    """With the component that cannot be built without torchvision."""
    if name.startswith("qwen-edit"):
        editors.add_qwen_processor(folder)
    return folder


def write_pipeline(name: str, folder: Path, device: torch.device) -> Path:
    """The pipeline with random weights in bfloat16, made on the device. T5-XXL, which several have,
    is stored once, beside the folder."""
    with _bfloat16_on(device):
        pipe = SIZES[name]()
    pipe.save_config(folder)
    for part_name, part in pipe.components.items():
        target = folder / part_name
        if isinstance(part, transformers.T5EncoderModel):
            shared = folder.parent / "t5"
            target.symlink_to(shared, target_is_directory=True)
            if shared.exists():
                continue
            target = shared
        if isinstance(part, torch.nn.Module):
            draw_weights(part)
        if part is not None:
            part.save_pretrained(target)
    return _completed(name, folder)


@contextmanager
def _bfloat16_on(device: torch.device) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def draw_weights(network: torch.nn.Module) -> None:
    """Outputs have the magnitude of inputs, and depend on all of them."""
    torch.manual_seed(0)
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1:
            gain = 0.5 if name.startswith("proj_out") else 1.0
            parameter.normal_(std=gain / math.sqrt(parameter[0].numel()))
        elif name.endswith("bias"):
            parameter.normal_(std=0.02)
        else:
            parameter.fill_(1.0)


def _sd35_medium() -> Any:
    dual = {"dual_attention_layers": tuple(range(13))}
    return _sd35(num_layers=24, heads=24, pos_embed_max_size=384, **dual)


def _sd35_large() -> Any:
    return _sd35(num_layers=38, heads=38, pos_embed_max_size=192)


def _sd35(heads: int, **sizes: Any) -> Any:
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=128, patch_size=2, in_channels=16, attention_head_dim=64,
            num_attention_heads=heads, joint_attention_dim=4096, caption_projection_dim=64 * heads,
            pooled_projection_dim=2048, out_channels=16, qk_norm="rms_norm", **sizes,
        ),
        scheduler=pipelines._scheduler(shift=3.0),
        vae=_vae(),
        text_encoder=_clip("L", projected=True),
        tokenizer=pipelines._clip_tokenizer(),
        text_encoder_2=_clip("G", projected=True),
        tokenizer_2=pipelines._clip_tokenizer(),
        text_encoder_3=_t5_xxl(),
        tokenizer_3=pipelines._t5_tokenizer(),
    )  # fmt: skip


def _flux_dev() -> Any:
    from diffusers import FluxPipeline, FluxTransformer2DModel

    dynamic = pipelines.DYNAMIC | {"base_shift": 0.5, "max_shift": 1.15, "shift": 3.0}
    return FluxPipeline(
        transformer=FluxTransformer2DModel(guidance_embeds=True),
        scheduler=pipelines._scheduler(**dynamic),
        vae=_vae(),
        text_encoder=_clip("L", projected=False),
        tokenizer=pipelines._clip_tokenizer(),
        text_encoder_2=_t5_xxl(),
        tokenizer_2=pipelines._t5_tokenizer(),
    )


def _kontext() -> Any:
    from diffusers import FluxKontextPipeline

    return FluxKontextPipeline(**_flux_dev().components)


def _qwen_image() -> Any:
    return _qwen("QwenImagePipeline", pipelines._qwen_tokenizer())


def _qwen_edit() -> Any:
    return _qwen("QwenImageEditPlusPipeline", editors._edit_tokenizer(), processor=None)


def _qwen_edit_short() -> Any:
    """The whole network, and a text encoder with 10 of 28 layers: 49 instead of 58 GB."""
    return _qwen("QwenImageEditPlusPipeline", editors._edit_tokenizer(), layers=10, processor=None)


def _qwen(pipeline: str, tokenizer: Any, layers: int = 28, **parts: Any) -> Any:
    import diffusers
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    dynamic = pipelines.DYNAMIC | {"base_shift": 0.5, "max_shift": 0.9, "shift_terminal": 0.02}
    return getattr(diffusers, pipeline)(
        transformer=QwenImageTransformer2DModel(),
        scheduler=pipelines._scheduler(**dynamic),
        vae=AutoencoderKLQwenImage(),
        text_encoder=Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(
                **pipelines.image_token_ids(tokenizer),
                text_config={
                    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
                    "num_hidden_layers": layers, "num_attention_heads": 28,
                    "num_key_value_heads": 4,
                    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
                },
                vision_config={
                    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
                    "out_hidden_size": 3584,
                },
            )
        ),
        tokenizer=tokenizer,
        **parts,
    )  # fmt: skip


def _flux2_dev() -> Any:
    return _flux2_pipeline(layers=(8, 48), text={})


def _flux2_dev_short() -> Any:
    """With the text encoder's 30 first layers, which the pipeline reads, and narrow MLPs: 80 GB
    instead of 111."""
    text = {"num_hidden_layers": 30, "intermediate_size": 8192}
    return _flux2_pipeline(layers=(8, 48), text=text)


def _flux2_pipeline(layers: tuple[int, int], text: dict[str, int]) -> Any:
    from diffusers import AutoencoderKLFlux2, Flux2Pipeline, Flux2Transformer2DModel
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    network = Flux2Transformer2DModel(num_layers=layers[0], num_single_layers=layers[1])
    mistral = {
        "model_type": "mistral", "vocab_size": 131072, "hidden_size": 5120, "head_dim": 128,
        "intermediate_size": 32768, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 131072,
    }  # fmt: skip
    return Flux2Pipeline(
        transformer=network,
        scheduler=pipelines._scheduler(use_dynamic_shifting=True, shift=3.0),
        vae=AutoencoderKLFlux2(),
        text_encoder=Mistral3ForConditionalGeneration(Mistral3Config(text_config=mistral | text)),
        tokenizer=pipelines._chat_tokenizer(pipelines.SPOKEN),
    )


def _klein_4b() -> Any:
    return _klein(5, 20, heads=24, text=_qwen3(2560, 9728, tied=True))


def _klein_9b() -> Any:
    return _klein(8, 24, heads=32, text=_qwen3(4096, 12288, tied=False))


def _klein(double: int, single: int, heads: int, text: Any) -> Any:
    from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Transformer2DModel

    return Flux2KleinPipeline(
        transformer=Flux2Transformer2DModel(
            num_layers=double, num_single_layers=single, num_attention_heads=heads,
            joint_attention_dim=3 * text.config.hidden_size, guidance_embeds=False,
        ),
        scheduler=pipelines._scheduler(use_dynamic_shifting=True, shift=3.0),
        vae=AutoencoderKLFlux2(),
        text_encoder=text,
        tokenizer=pipelines._chat_tokenizer(pipelines.CHAT),
    )  # fmt: skip


def _z_image() -> Any:
    from diffusers import ZImagePipeline, ZImageTransformer2DModel

    return ZImagePipeline(
        transformer=ZImageTransformer2DModel(axes_lens=[1536, 512, 512]),
        scheduler=pipelines._scheduler(shift=6.0),
        vae=_vae(),
        text_encoder=_qwen3(2560, 9728, tied=True),
        tokenizer=pipelines._chat_tokenizer(pipelines.CHAT),
    )


def _sana() -> Any:
    """SANA 1.5, 1.6B, with Gemma 2 of 2B."""
    from diffusers import (
        AutoencoderDC,
        DPMSolverMultistepScheduler,
        SanaPipeline,
        SanaTransformer2DModel,
    )
    from transformers import Gemma2Config, Gemma2Model

    stages = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
    with torch.device("cpu"):  # its constructor reads values
        scheduler = DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        )
    return SanaPipeline(
        transformer=SanaTransformer2DModel(qk_norm="rms_norm_across_heads"),
        scheduler=scheduler,
        vae=AutoencoderDC(
            encoder_block_types=stages, decoder_block_types=stages, scaling_factor=0.41407,
            upsample_block_type="interpolate", downsample_block_type="Conv",
        ),
        text_encoder=Gemma2Model(Gemma2Config()),
        tokenizer=pipelines._chat_tokenizer(pipelines.CHAT),
    )  # fmt: skip


def _qwen3(width: int, inner: int, tied: bool) -> Any:
    """Qwen3-4B and -8B."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=151936, hidden_size=width, intermediate_size=inner, num_hidden_layers=36,
            num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def _wan21() -> Any:
    """The 1.3B model."""
    return _wan({"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}, vae={}, shift=3.0)


def _wan22() -> Any:
    """The 5B model of Wan 2.2."""
    network = {
        "num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336, "in_channels": 48,
        "out_channels": 48,
    }  # fmt: skip
    vae = {
        "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True,
        "in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16,
        "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48,
    }  # fmt: skip
    return _wan(network, vae, shift=5.0, expand_timesteps=True)


def _wan22_experts() -> Any:
    """Wan 2.2 A14B."""
    return _wan({}, vae={}, shift=3.0, experts=2, boundary_ratio=0.875)


def _wan22_i2v() -> Any:
    """Wan 2.2 A14B, image to video."""
    network = {"in_channels": 36}
    return _wan(network, vae={}, shift=3.0, experts=2, kind="ImageToVideo", boundary_ratio=0.9)


def _wan(
    network: dict[str, Any],
    vae: dict[str, Any],
    shift: float,
    experts: int = 1,
    kind: str = "",
    **options: Any,
) -> Any:
    import diffusers
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    with torch.device("cpu"):  # its constructor reads values
        scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
        )
    names = ["transformer", "transformer_2"][:experts]
    return getattr(diffusers, f"Wan{kind}Pipeline")(
        **{name: WanTransformer3DModel(**network) for name in names},
        scheduler=scheduler,
        vae=AutoencoderKLWan(**vae),
        text_encoder=UMT5EncoderModel(
            UMT5Config(
                vocab_size=256384, d_model=4096, d_ff=10240, num_layers=24, num_heads=64,
                feed_forward_proj="gated-gelu",
            )
        ),
        tokenizer=pipelines._t5_tokenizer(),
        **options,
    )  # fmt: skip


SIZES: dict[str, Callable[[], Any]] = {
    "sd35": _sd35_medium,
    "sd35-large": _sd35_large,
    "flux": _flux_dev,
    "kontext": _kontext,
    "qwen-image": _qwen_image,
    "qwen-edit": _qwen_edit,
    "qwen-edit-short": _qwen_edit_short,
    "flux2-dev": _flux2_dev,
    "flux2-dev-short": _flux2_dev_short,
    "flux2-klein": _klein_4b,
    "flux2-klein-9b": _klein_9b,
    "z-image": _z_image,
    "sana": _sana,
    "wan21": _wan21,
    "wan22": _wan22,
    "wan22-a14b": _wan22_experts,
    "wan22-a14b-i2v": _wan22_i2v,
}


def _vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        latent_channels=16, block_out_channels=(128, 256, 512, 512), layers_per_block=2,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        sample_size=1024, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06,
    )  # fmt: skip


def _clip(size: str, projected: bool) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    width, layers, heads = {"L": (768, 12, 12), "G": (1280, 32, 20)}[size]
    kind = CLIPTextModelWithProjection if projected else CLIPTextModel
    return kind(
        CLIPTextConfig(
            hidden_size=width, intermediate_size=4 * width, projection_dim=width,
            num_hidden_layers=layers, num_attention_heads=heads,
        )
    )  # fmt: skip


def _t5_xxl() -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(
            vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
            feed_forward_proj="gated-gelu",
        )
    )  # fmt: skip


# Models that write: a transformers folder without weights, with the letters of tests/tokens.py


def write_writer(name: str, folder: Path) -> Path:
    """What `gesso check --memory` needs of a model that writes."""
    kind, sizes = WRITERS[name]
    tokens = writers.tokenizer(writers.TEMPLATE)
    ids = {"bos_token_id": None, "eos_token_id": tokens.eos_token_id}
    if kind == "Qwen2":
        config = getattr(transformers, f"{kind}Config")(**sizes, **ids)
    else:
        config = getattr(transformers, f"{kind}Config")(**_seeing(sizes, tokens, ids))
        _processor().save_pretrained(folder)
    config.architectures = [f"{kind}ForConditionalGeneration"]
    config.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


def write_weights(name: str, folder: Path, device: torch.device) -> Path:
    """The same with random weights in bfloat16, made on the device."""
    write_writer(name, folder)
    kind, _ = WRITERS[name]
    ends = "ForCausalLM" if kind == "Qwen2" else "ForConditionalGeneration"
    config = getattr(transformers, f"{kind}Config").from_pretrained(folder)
    with _bfloat16_on(device):
        model = getattr(transformers, kind + ends)(config)
    draw_weights(model)
    model.save_pretrained(folder)
    return folder


def _seeing(sizes: dict[str, Any], tokens: Any, ids: dict[str, Any]) -> dict[str, Any]:
    places = [("image_pad", "image_token_id"), ("video_pad", "video_token_id")]
    places += [("vision_start", "vision_start_token_id"), ("vision_end", "vision_end_token_id")]
    known = {key: tokens.convert_tokens_to_ids(f"<|{word}|>") for word, key in places}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text = {k: v for k, v in sizes.items() if k != "tie_word_embeddings"}
    vision = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        "out_hidden_size": sizes["hidden_size"],
    }  # fmt: skip
    return {
        "text_config": text | ids | {"rope_parameters": rope},
        "vision_config": vision,
        "tie_word_embeddings": sizes["tie_word_embeddings"],
        **known,
    }


def _processor() -> Any:
    return transformers.Qwen2VLImageProcessorPil(
        patch_size=14, min_pixels=3136, max_pixels=12845056, processor_class="Qwen2_5_VLProcessor"
    )


_3B: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
_7B: dict[str, Any] = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
_32B: dict[str, Any] = {
    "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
    "num_attention_heads": 40, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
WRITERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen25-vl-32b": ("Qwen2_5_VL", _32B),
    "qwen25-vl-3b": ("Qwen2_5_VL", _3B),
    "qwen25-vl-7b": ("Qwen2_5_VL", _7B),
    "qwen25-math-7b": ("Qwen2", _7B),
}
